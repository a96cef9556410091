"""What a script changed under paths that it named in full, kept so that it can be undone.

An entry is on the disk before the change is made. Undoing goes backwards, removes only what the
script itself made, and may be begun again after it was cut short.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from nfold.frameworks.scratch.locks import held
from nfold.plain import from_plain, to_plain

MOVED: Literal["moved"] = "moved"
MOST_KEPT_BYTES = 1 << 30
"""Of old content, all files together: what takes longer to keep is not worth an experiment."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One path before it was changed: not there, or a file, a folder or a link.

    ``kept`` is the name of the file's old content, what the link showed, or the name that the
    folder has now; ``mode`` is that of a folder.
    """

    path: str
    was: Literal["nothing", "file", "folder", "link", "moved"]
    kept: str = ""
    mode: int = 0o777


def _turn_of(entry: Entry) -> tuple[int, int]:
    """What is new goes first, from below; then folders come back from above, files, old names."""
    order = ("nothing", "folder", "link", "file", MOVED)
    depth = entry.path.count(os.sep)
    return order.index(entry.was), -depth if entry.was == "nothing" else depth


class Journal:
    """The journal in ``folder``, of all processes of one run."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._file = os.path.join(folder, "entries")
        self._known: set[str] = set()

    def keep(self, path: str) -> None:
        """Keep what is at ``path``; the first time counts.

        Raises PermissionError where that would be more than ``MOST_KEPT_BYTES`` in all.
        """
        if path in self._known:
            return
        with self._turn():
            if path not in {entry.path for entry in self._parts()[-1]}:
                self._add(self._before(path))
        self._known.add(path)

    def moved(self, source: str, target: str) -> None:
        """A folder is about to be renamed."""
        with self._turn():
            self._add(Entry(path=source, was=MOVED, kept=target))
        self._known.clear()

    def entries(self) -> list[Entry]:
        """All of them, the oldest first; a last one that was cut short was never acted on."""
        if not os.path.exists(self._file):
            return []
        with open(self._file, encoding="ascii") as file:
            lines = [line for line in file if line.endswith("\n")]
        return [from_plain(Entry, json.loads(line)) for line in lines]

    def undo(self) -> list[str]:
        """Put everything back; a sentence for each path where that was not possible."""
        failed = []
        for part in reversed(self._parts()):
            for entry in sorted(part, key=_turn_of):
                try:
                    self._put_back(entry)
                except OSError as error:
                    failed.append(f"{entry.path} is not as it was: {error.strerror}")
        return failed

    def _parts(self) -> list[list[Entry]]:
        """The entries, in parts that begin where a folder got another name: paths changed then."""
        parts: list[list[Entry]] = [[]]
        for entry in self.entries():
            if entry.was == MOVED:
                parts.append([])
            parts[-1].append(entry)
        return parts

    def _before(self, path: str) -> Entry:
        if os.path.islink(path):
            return Entry(path=path, was="link", kept=os.readlink(path))
        if not os.path.lexists(path):
            return Entry(path=path, was="nothing")
        if os.path.isdir(path):
            return Entry(path=path, was="folder", mode=os.stat(path).st_mode & 0o7777)
        entry = Entry(path=path, was="file", kept=str(len(os.listdir(self.folder))))
        self._check_size(path)
        shutil.copy2(path, self._kept(entry))
        return entry

    def _check_size(self, path: str) -> None:
        held = sum(entry.stat().st_size for entry in os.scandir(self.folder))
        if held + os.path.getsize(path) > MOST_KEPT_BYTES:
            raise PermissionError(
                f"nfold keeps at most {MOST_KEPT_BYTES / 1e9:.1f} GB of what a script overwrites "
                f"outside its working directory, {path} would be more; next: a relative path"
            )

    def _kept(self, entry: Entry) -> str:
        return os.path.join(self.folder, entry.kept)

    def _put_back(self, entry: Entry) -> None:
        there = os.path.lexists(entry.path)
        folder = os.path.isdir(entry.path) and not os.path.islink(entry.path)
        if entry.was == MOVED:
            if os.path.isdir(entry.kept) and not there:
                os.rename(entry.kept, entry.path)
        elif entry.was == "folder":
            if not folder:
                os.mkdir(entry.path, entry.mode)
        elif entry.was == "nothing":
            if folder:
                os.rmdir(entry.path)
            elif there:
                os.unlink(entry.path)
        elif entry.was == "link":
            if there:
                os.unlink(entry.path)
            os.symlink(entry.kept, entry.path)
        else:
            # Into the same file: it keeps its owner and its other names.
            shutil.copyfile(self._kept(entry), entry.path)
            shutil.copystat(self._kept(entry), entry.path)

    def _add(self, entry: Entry) -> None:
        with open(self._file, "a", encoding="ascii") as file:
            file.write(json.dumps(to_plain(entry)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _turn(self) -> IO[bytes]:
        os.makedirs(self.folder, exist_ok=True)
        return held(Path(f"{self.folder}.turn"))
