"""The states in which a run leaves files outside its sandbox, and changes by other processes.

inotify does not name the process that wrote. A process outside of the run is found by counting:
files were closed after writing more often than the processes of the run opened them for writing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import stat
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nfold.core.serialization import deserialize, serialize
from nfold.sandbox.audit_events import AUDIT_HOOK

OPENED, STATES = "opened", "states-"  # logs in the journal folder
PAUSE_S = 0.05  # between two reads of events: equal events of a busy file become one
IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE, IN_MOVED_TO = 0x2, 0x4, 0x8, 0x80
EVENT = struct.Struct("iIII")  # inotify(7): watch, mask, cookie, length of the name
F_SETSIG = 10


@dataclass(frozen=True, kw_only=True)
class FileState:
    """The attributes that change with every write to a file; the access time is not compared."""

    device: int
    inode: int
    mode: int
    links: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    ctime_ns: int
    atime_ns: int = field(compare=False)

    @classmethod
    def of(cls, path: str) -> FileState | None:
        """Return the state of the file, folder or link at ``path``; None if there is nothing."""
        try:
            found = os.lstat(path)
        except OSError:
            return None
        return cls(
            device=found.st_dev,
            inode=found.st_ino,
            mode=found.st_mode,
            links=found.st_nlink,
            uid=found.st_uid,
            gid=found.st_gid,
            size=found.st_size,
            mtime_ns=found.st_mtime_ns,
            ctime_ns=found.st_ctime_ns,
            atime_ns=found.st_atime_ns,
        )


class ChangeWatcher:
    """Watches files for the processes of one run; ``folder`` is its journal folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pid = 0
        self._events = -1
        self._paths: set[str] = set()
        self.foreign_paths: set[str] = set()  # changed by a process outside of the run

    def watch(self, path: str, *, opens: bool) -> None:
        """Note changes of a file from now on; ``opens``: this process is about to open it."""
        if self._pid != os.getpid():
            self._start()
        if opens:
            self._append(OPENED, path)
        folder = os.path.dirname(path)
        if path not in self._paths and self._events >= 0:
            mask = IN_MODIFY | IN_ATTRIB | IN_CLOSE_WRITE | IN_MOVED_TO
            number = ctypes.CDLL(None).inotify_add_watch(self._events, os.fsencode(folder), mask)
            self._watched[number] = folder
        self._paths.add(path)

    def stop(self) -> None:
        """Note no more changes."""
        self._paths, self._pid = set(), 0

    def note_state(self, path: str) -> None:
        """Note that this run has left a file in its current state."""
        state = FileState.of(path)
        if state is not None:
            self._append(f"{STATES}{os.getpid()}", [path, serialize(state)])

    def _start(self) -> None:
        # Also in a forked process, which has no copy of the thread.
        self._pid = os.getpid()
        self._paths = set()
        self._watched: dict[int, str] = {}
        self._closed: Counter[str] = Counter()
        try:
            self._events = ctypes.CDLL(None).inotify_init1(os.O_CLOEXEC)
        except AttributeError:  # not Linux
            return
        if self._events >= 0:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with AUDIT_HOOK.mute():
            while True:
                for path in self._changed_paths(os.read(self._events, 1 << 16)):
                    self.note_state(path)
                    if self._closed[path] and path not in self.foreign_paths:
                        self._look_for_others(path)
                time.sleep(PAUSE_S)

    def _changed_paths(self, events: bytes) -> set[str]:
        changed, at = set(), 0
        while at < len(events):
            watch, mask, _, length = EVENT.unpack_from(events, at)
            name = events[at + EVENT.size : at + EVENT.size + length].rstrip(b"\0")
            at += EVENT.size + length
            path = os.path.join(self._watched.get(watch, ""), os.fsdecode(name))
            if path in self._paths:
                changed.add(path)
                self._closed[path] += bool(mask & (IN_CLOSE_WRITE | IN_MOVED_TO))
        return changed

    def _look_for_others(self, path: str) -> None:
        opened = read_lines(Path(self._folder, OPENED)).count(path)
        if self._closed[path] + _count_open(path) > opened:
            self.foreign_paths.add(path)
            self._append(f"{STATES}{os.getpid()}", [path, None])

    def _append(self, name: str, value: object) -> None:
        append_line(Path(self._folder, name), value)


def read_states(folder: str) -> tuple[set[FileState], set[str]]:
    """Return all states in which a run left files, and the paths that others changed."""
    states, foreign = set(), set()
    for log in Path(folder).glob(f"{STATES}*"):
        for path, state in read_lines(log):
            if state is None:
                foreign.add(path)
            else:
                states.add(deserialize(FileState, state))
    return states, foreign


def is_open_for_writing(path: str) -> bool:
    """Return whether a process has the file open for writing; False where the kernel does not tell.

    The kernel grants a read lease only on a file that no process has open for writing.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):
            fcntl.fcntl(file, F_SETSIG, signal.SIGURG)  # SIGIO would end this process
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except (OSError, AttributeError):
        return False
    finally:
        os.close(file)
    return False


def _count_open(path: str) -> int:
    # How often this process has the file open for writing.
    count = 0
    for entry in os.scandir("/proc/self/fd"):
        try:
            if os.readlink(entry.path) == path:
                flags = Path("/proc/self/fdinfo", entry.name).read_text().split("flags:")[1]
                count += bool(int(flags.split()[0], 8) & os.O_ACCMODE)
        except OSError:
            continue
    return count


def append_line(file: Path, value: object) -> None:
    """Append a JSON value to a log that several processes write."""
    with file.open("a", encoding="ascii") as log:
        log.write(json.dumps(value) + "\n")


def read_lines(file: Path) -> list[Any]:
    """Return the values of a log, without lines that a kill has torn; none without the file."""
    found: list[Any] = []
    lines = file.read_text(encoding="ascii", errors="replace").split("\n") if file.exists() else []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found
