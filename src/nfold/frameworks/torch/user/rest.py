"""Waiting, at the end of a script, until the other threads of its process have come to rest."""

from __future__ import annotations

import threading
import time
from pathlib import Path

TASKS = Path("/proc/self/task")
LOOK_S = 0.002
LONGEST_S = 1.0
LOOKS = 2


def let_threads_rest(longest_s: float = LONGEST_S) -> bool:
    """Sleep until no other thread of this process has had anything to do in two looks in a row.

    A thread of gloo's that lets go of a tensor which Python made needs Python's lock. One that
    asks for it while Python ends aborts the process (PyTorch 2.13; docs/decisions/process-launch.md). Returns
    False where threads were still busy after ``longest_s`` seconds, or cannot be seen (not Linux).
    """
    until = time.monotonic() + longest_s
    before, quiet = _doings(), 0
    while quiet < LOOKS and time.monotonic() < until:
        time.sleep(LOOK_S)
        now = _doings()
        quiet = quiet + 1 if now is not None and now == before else 0
        before = now
    return quiet == LOOKS


def _doings() -> dict[str, str] | None:
    """How long each other thread has run; None where one runs, waits for a core or is unseen."""
    own = str(threading.get_native_id())
    doings = {}
    if not TASKS.exists():
        return None
    for task in TASKS.iterdir():
        if task.name == own:
            continue
        state, ran = _read(task / "stat"), _read(task / "schedstat")
        if state.rpartition(")")[2].split()[:1] in (["R"], ["D"]):
            return None
        doings[task.name] = ran
    return doings


def _read(file: Path) -> str:
    """What stands in the file; nothing where its thread has ended since."""
    try:
        return file.read_text()
    except OSError:
        return ""
