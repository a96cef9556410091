"""Edits of a script for settings that are in the plan rather than in an intervention."""

from __future__ import annotations

from nfold.core.script_profile import ScriptProfile
from nfold.core.source_edit import SetKeywords


def loader_batch_size(batch: int, profile: ScriptProfile) -> int:
    """Return the ``batch_size`` of a process whose steps have ``batch`` samples over all processes."""
    processes = 1 if profile.slices_batches else profile.world_size
    return -(-batch // (processes * profile.accumulation))


def learning_rate_advice(factor: float) -> str:
    """Return what to do for a batch that is so many times as large (Goyal et al., 2017)."""
    return f"learning rate × {factor:g}, after a warm-up (linear scaling rule)"


def loader_batch_edits(batch: int, profile: ScriptProfile) -> tuple[SetKeywords, ...] | None:
    """Return the edit for steps of ``batch`` samples; None as that of ``loader_worker_edits``."""
    return _loader_edits(profile, [("batch_size", str(loader_batch_size(batch, profile)))])


def loader_worker_edits(
    workers: int, profile: ScriptProfile, *, persistent: bool = False
) -> tuple[SetKeywords, ...] | None:
    """Return the edit that gives the training's DataLoader a number of workers.

    None if the script has no DataLoader, or a trainer creates it.
    """
    keywords = [("num_workers", str(workers))]
    if persistent:
        keywords.append(("persistent_workers", "True"))
    return _loader_edits(profile, keywords)


def _loader_edits(
    profile: ScriptProfile, keywords: list[tuple[str, str]]
) -> tuple[SetKeywords, ...] | None:
    line = profile.training_loader.created_at
    if line is None or profile.trainer == "transformers":
        return None
    return (SetKeywords(location=line, function="DataLoader", keywords=tuple(keywords)),)
