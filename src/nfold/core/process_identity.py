"""Identify a process by its id and its start time, and the processes of a session by a marker.

The kernel gives the id of a process that has ended to another one. A session is an nfold process
that starts runs. Its marker is ``NFOLD_SESSION=PID START``, in the environment of every process that
it starts; processes of a run have the name of the run as a third word.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SESSION_VARIABLE = "NFOLD_SESSION"
STAT_STATE, STAT_PARENT, STAT_START_TICKS = 0, 1, 19  # behind the command name, proc_pid_stat(5)


@dataclass(frozen=True)
class ProcessIdentity:
    """A process id and when the process started, in clock ticks since boot (0: not Linux)."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the identity of the process that has this id now; None if there is none."""
        if not Path("/proc/self/stat").exists():
            return cls(pid, 0) if _exists(pid) else None
        fields = _stat_fields(pid)
        return None if fields is None else cls(pid, int(fields[STAT_START_TICKS]))

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        found = cls.of(os.getpid())
        assert found is not None
        return found

    @property
    def session_marker(self) -> str:
        """The value of ``NFOLD_SESSION`` in the processes that this process starts."""
        return f"{self.pid} {self.start_ticks}"

    @property
    def is_running(self) -> bool:
        """Return whether this process, and no later one with its id, is running."""
        return ProcessIdentity.of(self.pid) == self

    @property
    def command(self) -> str:
        """The command line; empty if the process has ended."""
        with suppress(OSError):
            text = Path(f"/proc/{self.pid}/cmdline").read_text(errors="replace")
            return text[:200].replace("\0", " ").strip()
        return ""


def session_processes(marker: str, roots: Iterable[int] = ()) -> set[int]:
    """Return the ids of all processes that have the marker, of ``roots``, and of all descendants.

    The marker of a session is also that of its runs. A descendant may have another environment.
    """
    words = f"{SESSION_VARIABLE}={marker}".encode()
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    stats = {pid: fields for pid in pids if (fields := _stat_fields(pid)) is not None}
    found = more = {*roots, *(pid for pid in stats if _is_marked(pid, words))}
    while more:
        more = {pid for pid, fields in stats.items() if int(fields[STAT_PARENT]) in more} - found
        found = found | more
    return found - {os.getpid()}


def _is_marked(pid: int, words: bytes) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
    return any(one == words or one.startswith(words + b" ") for one in variables)


def _stat_fields(pid: int) -> list[str] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[STAT_STATE] in "ZX" else fields


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
