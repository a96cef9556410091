"""The files of an explanation: its page, its Markdown, and the values to show it again."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfold.core.errors import UsageError
from nfold.core.serialization import deserialize, replace_file, serialize
from nfold.core.workload import Workload
from nfold.explain.result.budget import Budget
from nfold.explain.result.view import Previous

EXPLANATION_FILE, PAGE_FILE, MARKDOWN_FILE = "explain.json", "explain.html", "explain.md"
FILE_VERSION = 1
RESERVED_NAMES = ("measurements", "telemetry")  # folders of the store


@dataclass(frozen=True, kw_only=True)
class StoredExplanation:
    """One explanation as it is kept. ``previous`` is that of the script before its last edit."""

    workload: Workload
    budget: Budget
    budget_s: float
    explained_at: str
    previous: Previous | None = None
    version: int = FILE_VERSION

    @classmethod
    def now(
        cls, workload: Workload, budget: Budget, budget_s: float, earlier: StoredExplanation | None
    ) -> StoredExplanation:
        """An explanation of this moment, which knows that of the script before its last edit."""
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(
            workload=workload,
            budget=budget,
            budget_s=budget_s,
            explained_at=time,
            previous=_previous(workload, earlier),
        )


def _previous(workload: Workload, earlier: StoredExplanation | None) -> Previous | None:
    """The explanation to compare with: of the same command, with other code."""
    if earlier is None or not workload.script or earlier.workload.script != workload.script:
        return None
    if earlier.workload.code == workload.code:
        return earlier.previous
    return Previous(
        samples_per_s=earlier.budget.n_devices.samples_per_s.value,
        devices=earlier.budget.devices,
        explained_at=earlier.explained_at,
    )


def explanation_folder(results: Path, workload: Workload) -> Path:
    """``nfold-results/sleepy`` for ``sleepy.py``: one folder per script or workload."""
    path = workload.script[0] if workload.script else str(workload)
    if workload.module is not None:
        path = workload.module
    stem = path.removesuffix(".py") if workload.script else path
    name = re.sub(r"[^\w.=-]+", "-", stem).strip("-.") or "script"
    return results / (f"{name}-explained" if name in RESERVED_NAMES else name)


def write_values(folder: Path, explanation: StoredExplanation) -> None:
    """Keep the values. Raises UsageError if the file cannot be written."""
    path = folder / EXPLANATION_FILE
    try:
        with replace_file(path) as temporary:
            temporary.write_text(json.dumps(serialize(explanation)), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}; next: another --results folder"
        ) from None


def read_values(folder: Path) -> StoredExplanation | None:
    """The kept explanation; None without one, or if another version of nfold wrote it."""
    try:
        values: Any = json.loads((folder / EXPLANATION_FILE).read_text(encoding="utf-8"))
        found = deserialize(StoredExplanation, values)
    except (OSError, ValueError):
        return None
    return found if found.version == FILE_VERSION else None


def find_latest(results: Path) -> StoredExplanation | None:
    """The newest kept explanation in a results folder."""
    found = [read_values(path.parent) for path in results.glob(f"*/{EXPLANATION_FILE}")]
    return max(filter(None, found), key=lambda one: one.explained_at, default=None)
