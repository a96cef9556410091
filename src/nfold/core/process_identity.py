"""Identify a process by its id and its start time: the kernel gives an id to another process."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STAT_STATE, STAT_START_TICKS = 0, 19  # fields behind the command name, proc_pid_stat(5)


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
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        return None if fields[STAT_STATE] in "ZX" else cls(pid, int(fields[STAT_START_TICKS]))

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        found = cls.of(os.getpid())
        assert found is not None
        return found

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


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
