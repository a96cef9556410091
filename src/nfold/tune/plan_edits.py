"""Edits of a script for settings that are in the plan rather than in an intervention."""

from __future__ import annotations

from nfold.core.script_profile import ScriptProfile
from nfold.core.source_edit import SetKeywords


def loader_worker_edits(
    workers: int, profile: ScriptProfile, *, persistent: bool = False
) -> tuple[SetKeywords, ...] | None:
    """Return the edit that gives the training's DataLoader a number of workers.

    None if the script has no DataLoader, or a trainer creates it.
    """
    loader = profile.loader
    if loader is None or loader.created_at is None or profile.trainer == "transformers":
        return None
    keywords = [("num_workers", str(workers))]
    if persistent:
        keywords.append(("persistent_workers", "True"))
    return (
        SetKeywords(location=loader.created_at, function="DataLoader", keywords=tuple(keywords)),
    )
