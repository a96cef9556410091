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

from nfold.frameworks.scratch.journal import Journal
from nfold.frameworks.scratch.locks import held
from nfold.frameworks.scratch.mirror import Mirror
from nfold.frameworks.scratch.rank import JOURNAL, LOCK, ROOT, TOUCHED
from nfold.place import shown_path

MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Touched:
    """What a script would have written: paths with sizes in bytes, the first written first.

    ``undone`` counts the files elsewhere that it really wrote and that are as before again;
    ``failed`` are sentences about those that are not.
    """

    files: tuple[tuple[str, int], ...] = ()
    undone: int = 0
    failed: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.files:
            return "would have written nothing"
        count, size = len(self.files), sum(size for _, size in self.files)
        names = [shown_path(path) for path, _ in self.files[:MOST_NAMED]]
        more = ", ..." if count > MOST_NAMED else ""
        put_back = f"; {self.undone} elsewhere, undone" if self.undone else ""
        return (
            f"would have written {count} file{'s' * (count != 1)} ({_size(size)}): "
            f"{', '.join(names)}{more}{put_back}"
        )


def settled(folder: Path) -> Touched:
    """Undo and clear away what a run left in its scratch folder, however it ended.

    What could not be put back stays in the folder, with the old content.
    """
    mine = folder.with_name(f"{folder.name}-{os.getpid()}")
    try:
        folder.rename(mine)
    except FileNotFoundError:
        return Touched()
    with contextlib.ExitStack() as stack:
        # A loader's worker that outlives its rank for a moment still has the lock.
        with contextlib.suppress(OSError):
            stack.enter_context(held(mine / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB))
        return _settled(Path(os.path.realpath(mine)))


def left_over(measurements: Path) -> list[Touched]:
    """Settle the scratch folders whose runs and parents are gone; what was in them.

    ``measurements`` holds the folders of all runs. One that a living process holds is left alone.
    """
    found = [folder for folder in measurements.glob("*/scratch*") if not _is_held(folder)]
    return [settled(folder) for folder in sorted(found)]


def _settled(folder: Path) -> Touched:
    noted = _noted(folder)
    files = tuple(_sizes(folder, noted))
    failed = Journal(str(folder / JOURNAL)).undo()
    shutil.rmtree(folder / ROOT, ignore_errors=True)
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    undone = sum(not inside for _, inside in noted)
    return Touched(files=files, undone=undone, failed=tuple(failed))


def _sizes(folder: Path, noted: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, int]]:
    mirror = Mirror(str(folder / ROOT))
    for path, inside in noted:
        place = mirror.place(path) if inside else path
        if os.path.isfile(place) and not (inside and os.path.islink(place)):
            yield path, os.path.getsize(place)


def _noted(folder: Path) -> list[tuple[str, bool]]:
    """The paths that all ranks wrote to, each once, and whether that was in the folder."""
    file = folder / TOUCHED
    lines = file.read_text(encoding="ascii").split("\n")[:-1] if file.exists() else []
    return list(dict.fromkeys((path, inside) for path, inside in map(json.loads, lines)))


def _is_held(folder: Path) -> bool:
    try:
        held(folder / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB).close()
    except OSError:
        return True
    return False


def _size(size: int) -> str:
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= bytes_:
            return f"{size / bytes_:.1f} {unit}"
    return f"{size} bytes"
