"""The journal of changes under absolute paths, from which they are undone.

The journal and the backups lie in a private folder of the user, never in the results folder: a
results folder may come from someone else. A backup and its entry are on the disk before the change
is made. Undo goes backwards, removes only what the script itself left, and may be interrupted and
started again. Where another process may have written, the current file and the backup both stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import glob
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from nfold.core.process_identity import ProcessIdentity
from nfold.core.serialization import deserialize, serialize
from nfold.sandbox.change_watcher import (
    ChangeWatcher,
    FileState,
    append_line,
    is_open_for_writing,
    read_lines,
    read_states,
)
from nfold.sandbox.file_claims import ENTRIES, FileClaims, journal_folder, private_folder
from nfold.sandbox.file_lock import lock_file

RENAMED: Literal["moved"] = "moved"
MAX_BACKUP_BYTES = 1 << 30  # all files together: larger backups take longer than an experiment
MAX_REPLACED_BYTES = 1 << 24  # of a file that a script left: undo keeps a copy of a smaller one
REPLACED_DAYS = 7
RUN, RESTORED, LOCK, CLEANUP_LOCK = "run", "restored", "lock", "cleanup"
BACKUP, REPLACED, FOREIGN = "before-", "replaced-", "other-"
SHARED_MEMORY = "-shm"  # an SQLite file without data of its own


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """The state of one path before it was changed.

    ``backup`` is the name of the file with the old content, the target of the link, or the new
    name of the folder. Of the files of one ``unit`` all are restored, or none.
    """

    path: str
    kind: Literal["nothing", "file", "folder", "link", "attributes", "moved"]
    backup: str = ""
    before: FileState | None = None
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class JournaledRun:
    """The run of a journal: its sandbox folder, and the nfold process that started it."""

    folder: str
    pid: int
    start_ticks: int

    @property
    def session_is_running(self) -> bool:
        return ProcessIdentity(self.pid, self.start_ticks).is_running


def _undo_order(entry: JournalEntry) -> tuple[int, int]:
    order = ("nothing", "folder", "link", "file", "attributes", RENAMED)
    depth = entry.path.count(os.sep)
    return order.index(entry.kind), -depth if entry.kind == "nothing" else depth


class UndoJournal:
    """The journal of the run whose sandbox is ``sandbox``, shared by all its processes."""

    def __init__(self, sandbox: str) -> None:
        self._sandbox = sandbox
        self._claims = FileClaims(sandbox)
        self.folder = str(journal_folder(sandbox))
        self._file = os.path.join(self.folder, ENTRIES)
        self._watcher = ChangeWatcher(self.folder)
        self._recorded_paths: set[tuple[str, bool]] = set()

    def create(self) -> None:
        """Create the folder of the journal, and note the run in it."""
        os.makedirs(self.folder, exist_ok=True, mode=0o700)
        session = self._claims.session
        run = JournaledRun(folder=self._sandbox, pid=session.pid, start_ticks=session.start_ticks)
        aside = Path(self.folder, f"{RUN}-{os.getpid()}")
        aside.write_text(json.dumps(serialize(run)), encoding="ascii")
        aside.replace(Path(self.folder, RUN))

    def close(self) -> None:
        self._watcher.stop()

    def lock_cleanup(self) -> IO[bytes]:
        return lock_file(Path(self.folder, CLEANUP_LOCK))

    def back_up(
        self,
        path: str,
        *,
        opens: bool = False,
        destroys: bool = False,
        content: bool = True,
        unit: str = "",
    ) -> None:
        """Back up the state of ``path``, unless this run has done so.

        ``opens``: this process is about to open the file, or to replace it; ``destroys``: its
        content; without ``content`` only mode, owner and times will change. Raises PermissionError
        if the backups would exceed ``MAX_BACKUP_BYTES``, and MachineUnfit if another run has
        changed the path.
        """
        if (path, content) not in self._recorded_paths:
            with self._lock():
                entries = [entry for _, entry in self._parts()[-1] if entry.path == path]
                if not any(not content or entry.kind != "attributes" for entry in entries):
                    self._claims.claim(path)
                    self._record(path, content, unit)
            self._recorded_paths.add((path, content))
        elif destroys and path in self._watcher.foreign_paths:
            self._keep_copy(path, FOREIGN, MAX_BACKUP_BYTES)
        self._watcher.watch(path, opens=opens)

    def record_rename(self, source: str, target: str) -> None:
        """Record that a folder is about to be renamed."""
        with self._lock():
            self._claims.claim(source, tree=True)
            self._claims.claim(target, tree=True)
            self._append(JournalEntry(path=source, kind=RENAMED, backup=target))
        self._recorded_paths.clear()

    def undo(self, *, witnessed: bool) -> dict[str, str]:
        """Restore every path; returns a sentence for each path that could not be restored.

        ``witnessed``: this process has seen the run end just now. Otherwise a file is restored
        only if it is as the run is known to have left it.
        """
        problems, pending = self._torn_entries(), set()
        notes = self._restored_notes()
        states, foreign = read_states(self.folder)
        for part in reversed(self._parts()):
            todo = [entry for number, entry in part if number not in notes]
            reasons = ((e, self._conflict(e, witnessed, states, foreign)) for e in todo)
            conflicts = {entry.unit or entry.path: reason for entry, reason in reasons if reason}
            for number, entry in sorted(part, key=lambda item: _undo_order(item[1])):
                if number not in notes:
                    conflict = conflicts.get(entry.unit or entry.path, "")
                    reason = self._settle(number, entry, conflict)
                    if reason is not None:
                        pending.add(entry.path)
                        problems[entry.path] = self._not_restored(entry, reason)
                        continue
                    notes[number] = conflict
                if notes[number] and (entry.backup or FileState.of(entry.path)):
                    problems.setdefault(entry.path, self._kept(entry, notes[number]))
        if pending:
            self._claims.release(keep=pending)
        return problems

    def remove_if_settled(self) -> bool:
        """Delete the journal after undo, but no content that was not restored.

        Returns False, and deletes nothing, if a path must be tried again.
        """
        entries, notes, last = self._read()[0], self._restored_notes(), (ENTRIES, RESTORED, RUN)
        if len(notes) < len(entries):
            return False
        done = {entry.backup for number, entry in enumerate(entries) if not notes[number]}
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        for name in sorted(names, key=lambda name: last.index(name) if name in last else -1):
            if name in done or not name.startswith((BACKUP, REPLACED, FOREIGN)):
                os.unlink(os.path.join(self.folder, name))
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)
        return True

    def _settle(self, number: int, entry: JournalEntry, conflict: str) -> str | None:
        # Restore one path, unless there is a conflict; returns why it must be tried again.
        reason = self._claims.holder(entry.path)
        if reason is None:
            try:
                if not conflict:
                    self._restore(entry, number)
                    self._watcher.note_state(entry.path)
                # Paths below a renamed folder lead nowhere once the rename is undone: what is
                # restored must not be tried again when undo is started again.
                append_line(Path(self.folder, RESTORED), [number, conflict])
            except OSError as error:
                reason = error.strerror or str(error)
        return reason

    def _conflict(
        self, entry: JournalEntry, witnessed: bool, states: set[FileState], foreign: set[str]
    ) -> str | None:
        # Why the current file may hold what another process wrote.
        now, folder = FileState.of(entry.path), os.path.dirname(entry.path)
        if now is None and entry.kind == "file" and not (witnessed or os.path.isdir(folder)):
            known = any(other.path == folder for other in self._read()[0])
            return None if known else f"{folder} was deleted after the run was killed"
        if now is None or now == entry.before or entry.kind in ("folder", RENAMED):
            return None
        if stat.S_ISDIR(now.mode) and entry.kind != "attributes":
            return None  # removed only if it is empty
        if entry.unit and entry.path.endswith(SHARED_MEMORY):
            return None
        if entry.path in foreign:
            return "another process changed it while the script ran"
        if is_open_for_writing(entry.path):
            return "another process has it open for writing"
        if witnessed or now in states or self._has_old_content(entry):
            return None
        return "it may have been changed after the run was killed"

    def _has_old_content(self, entry: JournalEntry) -> bool:
        if entry.kind != "file" or os.path.islink(entry.path):
            return False
        try:
            return filecmp.cmp(entry.path, self._backup_path(entry), shallow=False)
        except OSError:
            return False

    def _kept(self, entry: JournalEntry, conflict: str) -> str:
        left = f"{entry.path} stays as it is now: {conflict}"
        if entry.kind == "file":
            copies = sorted(Path(self.folder).glob(f"{FOREIGN}*-{glob.escape(_name(entry.path))}"))
            places = ", ".join([self._backup_path(entry), *map(str, copies)])
            return f"{left}; what was there before is in {places}; next: compare the contents"
        before = {
            "nothing": "did not exist",
            "link": f"was a link to {entry.backup}",
        }.get(entry.kind, "had another mode, owner or time")
        return f"{left}; before the script ran it {before}; next: change it back if you need to"

    def _not_restored(self, entry: JournalEntry, reason: str) -> str:
        backup = f"; its old content is in {self._backup_path(entry)}"
        return f"{entry.path} is not restored: {reason}{backup * (entry.kind == 'file')}"

    def _restored_notes(self) -> dict[int, str]:
        return dict(read_lines(Path(self.folder, RESTORED)))

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

    def _backups(self) -> set[str]:
        return {name for name in os.listdir(self.folder) if name.startswith(BACKUP)}

    def _torn_entries(self) -> dict[str, str]:
        entries, torn = self._read()
        if not torn:
            return {}
        known = {entry.path for entry in entries}
        unknown = sorted(set(self._claims.own_paths()) - known)
        backups = sorted(self._backups() - {entry.backup for entry in entries})
        lie = ", ".join(os.path.join(self.folder, name) for name in backups)
        where = f"its old content is in {lie}" if lie else "nothing was backed up for it"
        for line in torn:
            named = re.search(r'"path": ("(?:[^"\\]|\\.)*")', line)
            path = json.loads(named[1]) if named else None
            unknown = [path] if path else unknown or ["an unknown file"]
        return {
            path: f"{path}: its entry in the journal of the run is torn (power loss?), so the "
            f"script had not yet changed it; {where}; next: compare them"
            for path in unknown
        }

    def _parts(self) -> list[list[tuple[int, JournalEntry]]]:
        # The numbered entries; each renamed folder begins a part.
        parts: list[list[tuple[int, JournalEntry]]] = [[]]
        for number, entry in enumerate(self._read()[0]):
            if entry.kind == RENAMED:
                parts.append([])
            parts[-1].append((number, entry))
        return parts

    def _record(self, path: str, content: bool, unit: str) -> None:
        before = FileState.of(path)
        entry = JournalEntry(path=path, kind="nothing", before=before, unit=unit)
        if before is not None:
            if stat.S_ISLNK(before.mode):
                entry = dataclasses.replace(entry, kind="link", backup=os.readlink(path))
            elif not content:
                entry = dataclasses.replace(entry, kind="attributes")
            elif stat.S_ISDIR(before.mode):
                entry = dataclasses.replace(entry, kind="folder")
            elif stat.S_ISREG(before.mode):
                entry = dataclasses.replace(
                    entry, kind="file", backup=f"{BACKUP}{len(self._backups())}"
                )
                self._check_size(path)
                shutil.copyfile(path, self._backup_path(entry))
                _sync(self._backup_path(entry), self.folder)
            else:
                return  # a pipe, a socket or a device
        self._append(entry)

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

    def _restore(self, entry: JournalEntry, number: int) -> None:
        now = FileState.of(entry.path)
        if entry.kind == RENAMED:
            if os.path.isdir(entry.backup) and now is None:
                os.rename(entry.backup, entry.path)
        elif now == entry.before or (entry.kind == "folder" and os.path.isdir(entry.path)):
            return
        elif entry.kind == "folder":
            os.mkdir(entry.path)
            self._restore_attributes(entry)
        elif entry.kind == "attributes":
            if now is not None:
                self._restore_attributes(entry)
        else:
            self._keep_copy(entry.path, REPLACED, MAX_REPLACED_BYTES)
            if now is not None and stat.S_ISDIR(now.mode):
                os.rmdir(entry.path)
            elif now is not None and entry.kind != "file":
                os.unlink(entry.path)
            if entry.kind == "link":
                os.symlink(entry.backup, entry.path)
            elif entry.kind == "file":
                self._restore_content(entry, number)

    def _restore_content(self, entry: JournalEntry, number: int) -> None:
        folder = os.path.dirname(entry.path)
        os.makedirs(folder, exist_ok=True)
        aside = os.path.join(folder, f".nfold-{os.path.basename(self.folder)[:8]}-{number}")
        now = FileState.of(entry.path)
        assert entry.before is not None
        if now is not None and entry.before.links > 1 and now.inode == entry.before.inode:
            aside = entry.path  # the other names of the file stay names of it
        try:
            shutil.copyfile(self._backup_path(entry), aside)
            self._restore_attributes(entry, aside)
            _sync(aside)
            os.replace(aside, entry.path)
        finally:
            if aside != entry.path:
                Path(aside).unlink(missing_ok=True)

    def _restore_attributes(self, entry: JournalEntry, path: str = "") -> None:
        before, path = entry.before, path or entry.path
        assert before is not None
        with contextlib.suppress(PermissionError):
            os.chown(path, before.uid, before.gid)
        os.chmod(path, stat.S_IMODE(before.mode))
        os.utime(path, ns=(before.atime_ns, before.mtime_ns))

    def _keep_copy(self, path: str, prefix: str, max_bytes: int) -> None:
        # Of a file that is about to be overwritten.
        now = FileState.of(path)
        if now is not None and stat.S_ISREG(now.mode) and now.size <= max_bytes:
            suffix = f"-{_name(path)}"
            file, copy = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=self.folder)
            os.close(file)
            shutil.copyfile(path, copy)

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
        return lock_file(Path(self.folder, LOCK))


def journaled_runs() -> Iterator[JournaledRun]:
    """Yield the runs of this user that have a journal; delete copies that are older than a week."""
    for folder in private_folder("undo").iterdir():
        try:
            run = (folder / RUN).read_text(encoding="ascii")
            yield deserialize(JournaledRun, json.loads(run))
        except FileNotFoundError:
            if time.time() - folder.stat().st_mtime > REPLACED_DAYS * 86400:
                for copy in folder.glob(f"{REPLACED}*"):
                    copy.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    folder.rmdir()
        except (OSError, ValueError):
            continue


def _name(path: str) -> str:
    return os.path.basename(path)[-100:]


def _sync(*paths: str) -> None:
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
