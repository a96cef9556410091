"""What a script changed under absolute paths, recorded so that it can be undone.

A backup and its entry are on the disk before the change is made. Undo goes backwards, removes only
what the script itself created, and may be interrupted and started again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from nfold.core.serialization import deserialize, serialize
from nfold.sandbox.file_claims import FileClaims
from nfold.sandbox.file_lock import lock_file

RENAMED: Literal["moved"] = "moved"
MAX_BACKUP_BYTES = 1 << 30  # all files together: larger backups take longer than an experiment


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """The state of one path before it was changed.

    ``backup`` is the name of the file with the old content, the target of the link, or the new
    name of the folder; ``mode`` is the mode of a folder.
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
    """The journal in ``folder``, shared by all processes of one run."""

    def __init__(self, folder: str, claims: FileClaims) -> None:
        self.folder = folder
        self._claims = claims
        self._file = os.path.join(folder, "entries")
        self._recorded_paths: set[str] = set()

    def back_up(self, path: str) -> None:
        """Back up the state of ``path``, unless this run has done so.

        Raises PermissionError if the backups would exceed ``MAX_BACKUP_BYTES``, and MachineUnfit
        if another run has changed the path.
        """
        if path in self._recorded_paths:
            return
        with self._lock():
            if path not in {entry.path for entry in self._entries_by_rename()[-1]}:
                self._claims.claim(path)
                self._append(self._entry_for(path))
        self._recorded_paths.add(path)

    def record_rename(self, source: str, target: str) -> None:
        """Record that a folder is about to be renamed."""
        with self._lock():
            self._claims.claim(source, tree=True)
            self._claims.claim(target, tree=True)
            self._append(JournalEntry(path=source, kind=RENAMED, backup=target))
        self._recorded_paths.clear()

    def undo(self) -> list[str]:
        """Restore every path; returns a sentence for each path that could not be restored."""
        failed, kept_paths = self._torn_entries(), set()
        restored = self._restored_positions()
        numbered = iter(range(len(self._read()[0])))
        parts = [[(next(numbered), e) for e in part] for part in self._entries_by_rename()]
        for part in reversed(parts):
            for position, entry in sorted(part, key=lambda item: _undo_order(item[1])):
                if position in restored:
                    continue
                reason = self._claims.holder(entry.path)
                try:
                    if reason is None:
                        self._restore(entry)
                        self._note_restored(position)
                except OSError as error:
                    reason = error.strerror
                if reason is not None:
                    kept_paths.add(entry.path)
                    backup = f"; its old content is in {self._backup_path(entry)}"
                    failed.append(
                        f"{entry.path} is not restored: {reason}{backup * (entry.kind == 'file')}"
                    )
        if failed:
            self._claims.release(keep=kept_paths)
        return failed

    def _note_restored(self, position: int) -> None:
        # Paths below a renamed folder lead nowhere once the rename is undone: what is restored
        # must not be tried again when undo is started again.
        with open(f"{self._file}.restored", "a", encoding="ascii") as file:
            file.write(f"{position}\n")

    def _restored_positions(self) -> set[int]:
        file = Path(f"{self._file}.restored")
        lines = file.read_text(encoding="ascii").split("\n")[:-1] if file.exists() else []
        return set(map(int, lines))

    def _read(self) -> tuple[list[JournalEntry], list[str]]:
        """Return the complete entries, the oldest first, and the lines that are not complete."""
        if not os.path.exists(self._file):
            return [], []
        entries, torn = [], []
        with open(self._file, encoding="ascii", errors="replace") as file:
            for line in filter(None, file.read().split("\n")):
                try:
                    entries.append(deserialize(JournalEntry, json.loads(line)))
                except ValueError:
                    torn.append(line)
        return entries, torn

    def _torn_entries(self) -> list[str]:
        entries, torn = self._read()
        if not torn:
            return []
        known = {entry.path for entry in entries}
        unknown = sorted(set(self._claims.own_paths()) - known)
        backups = (
            set(os.listdir(self.folder))
            - {entry.backup for entry in entries}
            - {"entries", "entries.restored"}
        )
        lie = ", ".join(os.path.join(self.folder, name) for name in sorted(backups))
        where = f"its old content is in {lie}" if lie else "nothing was backed up for it"
        for line in torn:
            named = re.search(r'"path": ("(?:[^"\\]|\\.)*")', line)
            path = json.loads(named[1]) if named else None
            unknown = [path] if path else unknown or ["an unknown file"]
        return [
            f"{path}: its entry in {self._file} is torn (power loss?), so the script had not yet "
            f"changed it; {where}; next: compare them and delete {self.folder}"
            for path in unknown
        ]

    def _entries_by_rename(self) -> list[list[JournalEntry]]:
        parts: list[list[JournalEntry]] = [[]]
        for entry in self._read()[0]:
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
        _sync(self._backup_path(entry), self.folder)
        return entry

    def _check_size(self, path: str) -> None:
        used = sum(entry.stat().st_size for entry in os.scandir(self.folder))
        if used + os.path.getsize(path) > MAX_BACKUP_BYTES:
            raise PermissionError(
                f"nfold backs up at most {MAX_BACKUP_BYTES / 1e9:.1f} GB of files that a script "
                f"overwrites outside its working directory; {path} would exceed this; next: let "
                "the script write under a relative path"
            )

    def _backup_path(self, entry: JournalEntry) -> str:
        return os.path.join(self.folder, entry.backup)

    def _restore(self, entry: JournalEntry) -> None:
        exists = os.path.lexists(entry.path)
        is_folder = os.path.isdir(entry.path) and not os.path.islink(entry.path)
        if entry.kind == RENAMED:
            if os.path.isdir(entry.backup) and not exists:
                os.rename(entry.backup, entry.path)
        elif entry.kind == "folder":
            if not is_folder:
                os.mkdir(entry.path, entry.mode)
        elif entry.kind == "nothing":
            if is_folder:
                os.rmdir(entry.path)
            elif exists:
                os.unlink(entry.path)
        elif entry.kind == "link":
            if exists:
                os.unlink(entry.path)
            os.symlink(entry.backup, entry.path)
        else:
            # Into the same file: it keeps its owner and its hard links.
            shutil.copyfile(self._backup_path(entry), entry.path)
            shutil.copystat(self._backup_path(entry), entry.path)
            _sync(entry.path)

    def _append(self, entry: JournalEntry) -> None:
        with open(self._file, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a torn entry of a killed process
                    file.write(b"\n")
            file.write(json.dumps(serialize(entry)).encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _lock(self) -> IO[bytes]:
        os.makedirs(self.folder, exist_ok=True)
        return lock_file(Path(f"{self.folder}.lock"))


def _sync(*paths: str) -> None:
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
