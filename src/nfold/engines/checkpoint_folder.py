"""A folder of checkpoints as it is seen without any framework: which is newest, how far it came.

A checkpoint is a folder ``step-N``; while one replaces another of the same name, the old one is
``step-N.before``. Those of ``nfold train`` are in ``run-K`` of the chosen folder, K counting how
often training was begun anew, and say in ``trained.json`` what they are.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfold.core.errors import DataCorrupt, UsageError
from nfold.core.measurement import Epoch
from nfold.core.plan import Plan
from nfold.core.serialization import deserialize, serialize

REPLACED_SUFFIX = ".before"
CHECKPOINT_NAME = re.compile(rf"step-(\d+)({re.escape(REPLACED_SUFFIX)})?")
ATTEMPT_NAME = re.compile(r"run-(\d+)")
METADATA_FILE = "trained.json"
LOCK_FILE = ".lock"


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """What a checkpoint of ``nfold train`` says of itself: of what run, and its epochs so far."""

    cell: str
    workload: str
    plan: dict[str, Any]
    epochs: tuple[Epoch, ...]


def sorted_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints by their steps; one that was about to be replaced comes before its successor."""
    found = [
        (m, path) for path in folder.glob("step-*") if (m := CHECKPOINT_NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, key=lambda pair: (int(pair[0][1]), not pair[0][2]))]


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the most steps, or None where there is none."""
    found = sorted_checkpoints(folder)
    return found[-1] if found else None


def list_attempts(folder: Path) -> list[Path]:
    """The folders ``run-K``, in the order in which they were begun."""
    found = [(m, path) for path in folder.glob("run-*") if (m := ATTEMPT_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda pair: int(pair[0][1]))]


def select_attempt(folder: Path, *, restart: bool) -> Path:
    """The latest attempt that has a checkpoint, to go on with; ``again``: one that is new."""
    begun = list_attempts(folder)
    kept = [path for path in begun if newest_checkpoint(path) is not None]
    if kept and not restart:
        return kept[-1]
    last = ATTEMPT_NAME.fullmatch(begun[-1].name) if begun else None
    return folder / f"run-{int(last[1]) + 1 if last else 1}"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a folder of attempts for one process; UsageError where another one trains into it.

    The kernel lets go of it when the process ends, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another nfold trains into {folder}; next: wait for it, or --checkpoint FOLDER"
            ) from None
        yield


def write_metadata(folder: Path, metadata: CheckpointMetadata) -> None:
    """Write what a checkpoint is, beside its parts."""
    (folder / METADATA_FILE).write_text(json.dumps(serialize(metadata)))


def read_metadata(folder: Path) -> CheckpointMetadata:
    """What a checkpoint is; DataCorrupt names one that does not say it."""
    try:
        trained = deserialize(CheckpointMetadata, json.loads((folder / METADATA_FILE).read_text()))
        Plan.from_dict(trained.plan)
    except (OSError, ValueError) as error:
        raise DataCorrupt(
            f"{folder / METADATA_FILE} cannot be read ({error}); next: --again starts over"
        ) from None
    return trained
