"""Find checkpoints in a folder without any framework: which is newest, which is damaged.

A checkpoint is a folder ``step-N``. While it is replaced by another one of the same name, it is
called ``step-N.before``. ``nfold train`` saves checkpoints in ``run-K`` of the chosen folder,
where K counts how often training started from scratch, and describes each in ``trained.json``.
``sha256sum -c SHA256SUMS`` in a checkpoint verifies its files.
"""

from __future__ import annotations

import fcntl
import hashlib
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
METADATA_STEM = "trained"
METADATA_FILE = f"{METADATA_STEM}.json"
PROGRESS_PART = "progress"
LOCK_FILE = ".lock"
CHECKSUMS_FILE = "SHA256SUMS"


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """The training that a checkpoint of ``nfold train`` belongs to, and its epochs so far."""

    cell: str
    workload: str
    plan: dict[str, Any]
    epochs: tuple[Epoch, ...]


def sorted_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints by their steps, ``step-N.before`` before ``step-N``."""
    found = [
        (m, path) for path in folder.glob("step-*") if (m := CHECKPOINT_NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, key=lambda pair: (int(pair[0][1]), not pair[0][2]))]


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the readable checkpoint with the most steps, or None for a folder without any.

    If all checkpoints are damaged, returns the newest: reading it raises DataCorrupt.
    """
    found = sorted_checkpoints(folder)
    return next(filter(is_readable, reversed(found)), found[-1] if found else None)


def skipped_checkpoints_warning(folder: Path) -> str | None:
    """Return a line about damaged checkpoints newer than ``newest_checkpoint``, or None."""
    found = sorted_checkpoints(folder)
    newest = newest_checkpoint(folder)
    skipped = found[found.index(newest) + 1 :] if newest else []
    if not skipped:
        return None
    names = ", ".join(path.name for path in skipped)
    return f"{folder}: {names} cannot be read; resuming from {newest.name if newest else None}"


def is_readable(checkpoint: Path) -> bool:
    """Return whether every part of a checkpoint is present, has its full length and its checksum.

    A part is a JSON file and a safetensors file.
    """
    try:
        for path in checkpoint.iterdir():
            verify_checksum(path)
        texts = {path.stem: json.loads(path.read_text()) for path in checkpoint.glob("*.json")}
        tensors = {path.stem for path in checkpoint.glob("*.safetensors") if _is_whole(path)}
        required = _required_parts(texts)
    except (OSError, ValueError, TypeError, KeyError, DataCorrupt):
        return False
    return required <= texts.keys() and required <= tensors


def _is_whole(safetensors: Path) -> bool:
    """The format: the header's length in 8 bytes, a JSON header with offsets, the numbers."""
    with safetensors.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if 8 + header_bytes > safetensors.stat().st_size:
            return False
        header = json.loads(file.read(header_bytes))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return bool(safetensors.stat().st_size == 8 + header_bytes + max(ends, default=0))


def _required_parts(texts: dict[str, Any]) -> set[str]:
    found = texts.keys() - {METADATA_STEM}
    if METADATA_STEM in texts and PROGRESS_PART not in texts:  # of ``nfold train`` 0.1
        return {"model", "optimizer", "scaler", "rank-0", *found}
    progress = dict(texts[PROGRESS_PART]["mapping"])
    own = "random" if progress.get("format") == 1 else "rank"
    return {*progress["parts"], *(f"{own}-{rank}" for rank in range(progress["ranks"])), *found}


def write_checksums(folder: Path) -> None:
    lines = [_checksum_line(path) for path in sorted(folder.iterdir())]
    (folder / CHECKSUMS_FILE).write_text("".join(f"{line}\n" for line in lines))


def verify_checksum(file: Path) -> None:
    """Raise DataCorrupt if a file of a checkpoint differs from its checksum.

    Checkpoints of nfold 0.1 have no checksums.
    """
    checksums = file.with_name(CHECKSUMS_FILE)
    if file == checksums or not checksums.exists():
        return
    if _checksum_line(file) not in checksums.read_text(errors="replace").splitlines():
        raise DataCorrupt(f"{file} is damaged: it differs from its checksum in {CHECKSUMS_FILE}")


def _checksum_line(file: Path) -> str:
    stat = file.stat()
    version = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    if version not in _digests:
        with file.open("rb") as content:
            _digests[version] = hashlib.file_digest(content, "sha256").hexdigest()
    return f"{_digests[version]}  {file.name}"


_digests: dict[tuple[int, ...], str] = {}  # of this process, which reads each file only once


def superseded_checkpoints(newest: Path, keep: int) -> list[Path]:
    """Return the checkpoints up to ``newest`` except its ``keep`` last readable ones.

    A checkpoint with more steps than ``newest`` was skipped as damaged. It stays until training
    has passed it.
    """
    found = sorted_checkpoints(newest.parent)
    older = found[: found.index(newest)]
    readable = [path for path in older if is_readable(path)]
    return [path for path in older if path not in readable[max(0, len(readable) - (keep - 1)) :]]


def list_attempts(folder: Path) -> list[Path]:
    found = [(m, path) for path in folder.glob("run-*") if (m := ATTEMPT_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda pair: int(pair[0][1]))]


def select_attempt(folder: Path, *, restart: bool) -> Path:
    """Return the latest attempt with a checkpoint; a new one if none, or to ``restart``."""
    attempts = list_attempts(folder)
    resumable = [path for path in attempts if newest_checkpoint(path) is not None]
    if resumable and not restart:
        return resumable[-1]
    last = ATTEMPT_NAME.fullmatch(attempts[-1].name) if attempts else None
    return folder / f"run-{int(last[1]) + 1 if last else 1}"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a folder of attempts for one process. Raises UsageError if another one trains into it.

    The kernel releases the lock when the process ends for any reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another nfold process trains into {folder}; next: wait for it, or --checkpoint FOLDER"
            ) from None
        yield


def write_metadata(folder: Path, metadata: CheckpointMetadata) -> None:
    (folder / METADATA_FILE).write_text(json.dumps(serialize(metadata)))


def read_metadata(folder: Path) -> CheckpointMetadata:
    """Return the description of a checkpoint. Raises DataCorrupt if it cannot be read."""
    try:
        verify_checksum(folder / METADATA_FILE)
        metadata = deserialize(CheckpointMetadata, json.loads((folder / METADATA_FILE).read_text()))
        Plan.from_dict(metadata.plan)
    except (OSError, ValueError, DataCorrupt) as error:
        raise DataCorrupt(
            f"{folder / METADATA_FILE} cannot be read ({error}); next: --again starts over"
        ) from None
    return metadata
