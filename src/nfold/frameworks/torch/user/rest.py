"""Waiting, at the end of a script, until the other threads of its process have come to rest."""

from __future__ import annotations

import threading
import time
from pathlib import Path

THREADS_FOLDER = Path("/proc/self/task")
POLL_S = 0.002
MAX_WAIT_S = 1.0
QUIET_POLLS = 2


def wait_for_idle_threads(max_wait_s: float = MAX_WAIT_S) -> bool:
    """Sleep until no other thread of this process has had anything to do in two looks in a row.

    A thread of gloo's that lets go of a tensor which Python made needs Python's lock. One that
    asks for it while Python ends aborts the process (PyTorch 2.13; docs/decisions/process-launch.md). Returns
    False where threads were still busy after ``longest_s`` seconds, or cannot be seen (not Linux).
    """
    until = time.monotonic() + max_wait_s
    before, quiet = _thread_activity(), 0
    while quiet < QUIET_POLLS and time.monotonic() < until:
        time.sleep(POLL_S)
        now = _thread_activity()
        quiet = quiet + 1 if now is not None and now == before else 0
        before = now
    return quiet == QUIET_POLLS


def _thread_activity() -> dict[str, str] | None:
    """How long each other thread has run; None where one runs, waits for a core or is unseen."""
    own = str(threading.get_native_id())
    doings = {}
    if not THREADS_FOLDER.exists():
        return None
    for task in THREADS_FOLDER.iterdir():
        if task.name == own:
            continue
        state, ran = _read_text(task / "stat"), _read_text(task / "schedstat")
        if state.rpartition(")")[2].split()[:1] in (["R"], ["D"]):
            return None
        doings[task.name] = ran
    return doings


def _read_text(file: Path) -> str:
    """What stands in the file; nothing where its thread has ended since."""
    try:
        return file.read_text()
    except OSError:
        return ""
