"""Waiting until the processes that a rank has started have nothing more to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import psutil

IDLE_TIMEOUT_S = 3.0
"""Workers that are never idle do other things, too."""
IDLE_POLL_S = 0.1
IDLE_CORE_SHARE = 0.2
"""Of one core: less is nobody's work. A clock of processes ticks every 10 ms."""


def wait_for_idle_children(
    limit_s: float = IDLE_TIMEOUT_S, meanwhile: Callable[[], None] = lambda: None
) -> float:
    """Wait for the processes that this one has started, until they leave the cores alone.

    Returns the seconds waited, at most ``limit_s`` and a little; ``meanwhile`` is called often.
    """
    workers = psutil.Process().children(recursive=True)
    begin = time.perf_counter()
    at, used = begin, _used_s(workers)
    while workers and at - begin < limit_s:
        time.sleep(IDLE_POLL_S)
        meanwhile()
        before, at = at, time.perf_counter()
        used_before, used = used, _used_s(workers)
        if used - used_before <= IDLE_CORE_SHARE * (at - before):
            break
    return at - begin


def _used_s(processes: list[psutil.Process]) -> float:
    """Core time of those that still are."""
    found = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system
    return found
