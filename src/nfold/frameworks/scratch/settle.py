"""The parent's side: undo what a script changed elsewhere, count what it wrote, clear away."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nfold.frameworks.scratch.journal import UndoJournal
from nfold.frameworks.scratch.locks import lock_file
from nfold.frameworks.scratch.mirror import CopyOnWriteMirror
from nfold.frameworks.scratch.rank import JOURNAL, LOCK, ROOT, WRITE_LOG
from nfold.place import display_path

MAX_LISTED_FILES = 3


@dataclass(frozen=True, kw_only=True)
class WriteReport:
    """What a script would have written: paths with sizes in bytes, the first written first.

    ``undone`` counts the files elsewhere that it really wrote and that are as before again;
    ``failed`` are sentences about those that are not.
    """

    files: tuple[tuple[str, int], ...] = ()
    restored_count: int = 0
    restore_errors: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.files:
            return "would have written nothing"
        count, size = len(self.files), sum(size for _, size in self.files)
        names = [display_path(path) for path, _ in self.files[:MAX_LISTED_FILES]]
        more = ", ..." if count > MAX_LISTED_FILES else ""
        put_back = f"; {self.restored_count} elsewhere, undone" if self.restored_count else ""
        return (
            f"would have written {count} file{'s' * (count != 1)} ({_format_size(size)}): "
            f"{', '.join(names)}{more}{put_back}"
        )


def clean_up(folder: Path) -> WriteReport:
    """Undo and clear away what a run left in its scratch folder, however it ended.

    What could not be put back stays in the folder, with the old content.
    """
    mine = folder.with_name(f"{folder.name}-{os.getpid()}")
    try:
        folder.rename(mine)
    except FileNotFoundError:
        return WriteReport()
    with contextlib.ExitStack() as stack:
        # A loader's worker that outlives its rank for a moment still has the lock.
        with contextlib.suppress(OSError):
            stack.enter_context(lock_file(mine / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB))
        return _undo_and_remove(Path(os.path.realpath(mine)))


def clean_up_stale(measurements: Path) -> list[WriteReport]:
    """Settle the scratch folders whose runs and parents are gone; what was in them.

    ``measurements`` holds the folders of all runs. One that a living process holds is left alone.
    """
    found = [folder for folder in measurements.glob("*/scratch*") if not _is_locked(folder)]
    return [clean_up(folder) for folder in sorted(found)]


def _undo_and_remove(folder: Path) -> WriteReport:
    noted = _logged_writes(folder)
    files = tuple(_written_sizes(folder, noted))
    failed = UndoJournal(str(folder / JOURNAL)).undo()
    shutil.rmtree(folder / ROOT, ignore_errors=True)
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    undone = sum(not inside for _, inside in noted)
    return WriteReport(files=files, restored_count=undone, restore_errors=tuple(failed))


def _written_sizes(folder: Path, noted: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, int]]:
    mirror = CopyOnWriteMirror(str(folder / ROOT))
    for path, inside in noted:
        place = mirror.to_mirror(path) if inside else path
        if os.path.isfile(place) and not (inside and os.path.islink(place)):
            yield path, os.path.getsize(place)


def _logged_writes(folder: Path) -> list[tuple[str, bool]]:
    """The paths that all ranks wrote to, each once, and whether that was in the folder."""
    file = folder / WRITE_LOG
    lines = file.read_text(encoding="ascii").split("\n")[:-1] if file.exists() else []
    return list(dict.fromkeys((path, inside) for path, inside in map(json.loads, lines)))


def _is_locked(folder: Path) -> bool:
    try:
        lock_file(folder / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB).close()
    except OSError:
        return True
    return False


def _format_size(size: int) -> str:
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= bytes_:
            return f"{size / bytes_:.1f} {unit}"
    return f"{size} bytes"
