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

from nfold.core.serialization import deserialize, serialize
from nfold.sandbox.file_lock import lock_file

RENAMED: Literal["moved"] = "moved"
MAX_BACKUP_BYTES = 1 << 30
"""Of old content, all files together: what takes longer to keep is not worth an experiment."""


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """One path before it was changed: not there, or a file, a folder or a link.

    ``kept`` is the name of the file's old content, what the link showed, or the name that the
    folder has now; ``mode`` is that of a folder.
    """

    path: str
    kind: Literal["nothing", "file", "folder", "link", "moved"]
    backup: str = ""
    mode: int = 0o777


def _undo_order(entry: JournalEntry) -> tuple[int, int]:
    order = ("nothing", "folder", "link", "file", RENAMED)
    depth = entry.path.count(os.sep)
    return order.index(entry.kind), -depth if entry.kind == "nothing" else depth


class UndoJournal:
    """The journal in ``folder``, of all processes of one run."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._file = os.path.join(folder, "entries")
        self._recorded_paths: set[str] = set()

    def back_up(self, path: str) -> None:
        """Keep what is at ``path``; the first time counts.

        Raises PermissionError where that would be more than ``MOST_KEPT_BYTES`` in all.
        """
        if path in self._recorded_paths:
            return
        with self._lock():
            if path not in {entry.path for entry in self._entries_by_rename()[-1]}:
                self._append(self._entry_for(path))
        self._recorded_paths.add(path)

    def record_rename(self, source: str, target: str) -> None:
        """A folder is about to be renamed."""
        with self._lock():
            self._append(JournalEntry(path=source, kind=RENAMED, backup=target))
        self._recorded_paths.clear()

    def entries(self) -> list[JournalEntry]:
        """All of them, the oldest first; a last one that was cut short was never acted on."""
        if not os.path.exists(self._file):
            return []
        with open(self._file, encoding="ascii") as file:
            lines = [line for line in file if line.endswith("\n")]
        return [deserialize(JournalEntry, json.loads(line)) for line in lines]

    def undo(self) -> list[str]:
        """Put everything back; a sentence for each path where that was not possible."""
        failed = []
        for part in reversed(self._entries_by_rename()):
            for entry in sorted(part, key=_undo_order):
                try:
                    self._restore(entry)
                except OSError as error:
                    failed.append(f"{entry.path} is not as it was: {error.strerror}")
        return failed

    def _entries_by_rename(self) -> list[list[JournalEntry]]:
        parts: list[list[JournalEntry]] = [[]]
        for entry in self.entries():
            if entry.kind == RENAMED:
                parts.append([])
            parts[-1].append(entry)
        return parts

    def _entry_for(self, path: str) -> JournalEntry:
        if os.path.islink(path):
            return JournalEntry(path=path, kind="link", backup=os.readlink(path))
        if not os.path.lexists(path):
            return JournalEntry(path=path, kind="nothing")
        if os.path.isdir(path):
            return JournalEntry(path=path, kind="folder", mode=os.stat(path).st_mode & 0o7777)
        entry = JournalEntry(path=path, kind="file", backup=str(len(os.listdir(self.folder))))
        self._check_size(path)
        shutil.copy2(path, self._backup_path(entry))
        return entry

    def _check_size(self, path: str) -> None:
        held = sum(entry.stat().st_size for entry in os.scandir(self.folder))
        if held + os.path.getsize(path) > MAX_BACKUP_BYTES:
            raise PermissionError(
                f"nfold keeps at most {MAX_BACKUP_BYTES / 1e9:.1f} GB of what a script overwrites "
                f"outside its working directory, {path} would be more; next: a relative path"
            )

    def _backup_path(self, entry: JournalEntry) -> str:
        return os.path.join(self.folder, entry.backup)

    def _restore(self, entry: JournalEntry) -> None:
        there = os.path.lexists(entry.path)
        folder = os.path.isdir(entry.path) and not os.path.islink(entry.path)
        if entry.kind == RENAMED:
            if os.path.isdir(entry.backup) and not there:
                os.rename(entry.backup, entry.path)
        elif entry.kind == "folder":
            if not folder:
                os.mkdir(entry.path, entry.mode)
        elif entry.kind == "nothing":
            if folder:
                os.rmdir(entry.path)
            elif there:
                os.unlink(entry.path)
        elif entry.kind == "link":
            if there:
                os.unlink(entry.path)
            os.symlink(entry.backup, entry.path)
        else:
            # Into the same file: it keeps its owner and its other names.
            shutil.copyfile(self._backup_path(entry), entry.path)
            shutil.copystat(self._backup_path(entry), entry.path)

    def _append(self, entry: JournalEntry) -> None:
        with open(self._file, "a", encoding="ascii") as file:
            file.write(json.dumps(serialize(entry)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _lock(self) -> IO[bytes]:
        os.makedirs(self.folder, exist_ok=True)
        return lock_file(Path(f"{self.folder}.turn"))
