"""Apply a patch to the user's files, with a backup from which it is taken back."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from nfold.core.errors import UsageError
from nfold.core.serialization import replace_file
from nfold.tune.source_patch import SourcePatch

RECORD = "applied.json"


def check_can_apply(files: Iterable[Path], backup: Path) -> None:
    """Raise UsageError if an earlier patch is applied, or if a file is read-only."""
    if (backup / RECORD).exists():
        raise UsageError(
            "--apply: an earlier result is applied already; next: nfold tune SCRIPT --revert"
        )
    for path in files:
        writable = path.stat().st_mode & stat.S_IWUSR and os.access(path, os.W_OK)
        if not (writable and os.access(path.parent, os.W_OK)):
            raise UsageError(
                f"--apply: {path.name} is read-only; next: chmod u+w, or no --apply: the patch is "
                "written in any case"
            )


def apply_patch(patch: SourcePatch, folder: Path, backup: Path) -> list[Path]:
    """Write the edited files, whose paths are relative to ``folder``; return them.

    The originals are kept in ``backup``. Raises UsageError if a file is no longer what was edited
    or is read-only, or if an earlier patch is applied; then nothing is written.
    """
    files = [(folder / file.path, file) for file in patch.files]
    check_can_apply([path for path, _ in files], backup)
    for path, file in files:
        if path.read_bytes() != file.original:
            raise UsageError(f"--apply: {file.path} was changed meanwhile; next: nfold tune again")
    record = {str(path.absolute()): _digest(file.edited) for path, file in files}
    for number, (_, file) in enumerate(files):
        backup.mkdir(parents=True, exist_ok=True)
        (backup / str(number)).write_bytes(file.original)
    (backup / RECORD).write_text(json.dumps(record))
    for path, file in files:
        with replace_file(path) as temporary:
            temporary.write_bytes(file.edited)
            temporary.chmod(path.stat().st_mode)
    return [path for path, _ in files]


def revert_patch(backup: Path) -> list[Path]:
    """Write the originals back; return the files.

    Raises UsageError if nothing is applied, or if a file was changed since: then nothing is written.
    """
    try:
        record: dict[str, str] = json.loads((backup / RECORD).read_text())
    except FileNotFoundError:
        raise UsageError(
            "--revert: no result of nfold tune is applied to this script; allowed is a script "
            "after nfold tune SCRIPT --apply"
        ) from None
    paths = [Path(name) for name in record]
    originals = list(_originals(backup, len(paths)))
    for path, original in zip(paths, originals, strict=True):
        found = path.read_bytes()
        if found != original and _digest(found) != record[str(path)]:
            raise UsageError(
                f"--revert: {path.name} was changed since; next: git apply -R nfold.patch"
            )
    for path, original in zip(paths, originals, strict=True):
        with replace_file(path) as temporary:
            temporary.write_bytes(original)
            temporary.chmod(path.stat().st_mode)
    (backup / RECORD).unlink()
    return paths


def _originals(backup: Path, count: int) -> Iterator[bytes]:
    for number in range(count):
        yield (backup / str(number)).read_bytes()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
