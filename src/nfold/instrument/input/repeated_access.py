"""Notice a data set that keeps what it has computed: only the first epoch pays for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

GROUPS, SAMPLES = 3, 6  # in each group; all together spread over the data set
MIN_SAMPLE_S, MAX_SAMPLE_S = 1e-4, 0.2  # faster samples need no cache
MIN_SAVED_FRACTION, MAX_SAVED_FRACTION = 0.5, 0.99


def repeated_access_saving(dataset: Any, clock: Callable[[], float] = time.thread_time) -> float:
    """Return the fraction of the CPU time of a sample that a second access saves, 0 if it is small.

    The operating system may keep files too. That saves no CPU time of this thread. One thread: a
    thread that waits for others in a loop computes as well. The median of groups: a processor may
    become twice as fast between two accesses, but does not in most groups.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        size = len(dataset)
        *indices, last = range(0, size, -(-size // (GROUPS * SAMPLES + 1)) or 1)
        dataset[last]  # opens files, and compiles what is compiled on first use
        groups = [indices[group::GROUPS] for group in range(GROUPS)]
        saved = median(_saving(dataset, group, clock) for group in groups)
    except Exception:  # of the user, whose code is called more often than it expects
        return 0.0
    finally:
        torch.set_num_threads(threads)
    return min(MAX_SAVED_FRACTION, saved) if saved > MIN_SAVED_FRACTION else 0.0


def _saving(dataset: Any, indices: Sequence[int], clock: Callable[[], float]) -> float:
    first_s = _seconds(dataset, indices, clock)
    if not MIN_SAMPLE_S < first_s / len(indices) < MAX_SAMPLE_S:
        return 0.0
    return 1 - _seconds(dataset, indices, clock) / first_s


def _seconds(dataset: Any, indices: Sequence[int], clock: Callable[[], float]) -> float:
    start = clock()
    for index in indices:
        dataset[index]
    return clock() - start
