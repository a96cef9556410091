"""Notice a data set that keeps what it has computed: only the first epoch pays for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

SAMPLES = 12  # spread over the data set
MIN_SAMPLE_S = 1e-4  # faster samples need no cache
MIN_SAVED_FRACTION, MAX_SAVED_FRACTION = 0.5, 0.99
MAX_SECONDS = 2.0


def repeated_access_saving(dataset: Any, clock: Callable[[], float] = time.thread_time) -> float:
    """Return the fraction of the CPU time of a sample that a second access saves, 0 if it is small.

    The operating system may keep files too. That saves no CPU time of this thread. One thread: a
    thread that waits for others in a loop computes as well.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        size = len(dataset)
        indices = range(0, size, -(-size // SAMPLES) or 1)
        dataset[indices[-1]]  # opens files, and compiles what is compiled on first use
        first_s = _seconds(dataset, indices, clock)
        if not MIN_SAMPLE_S * len(indices) < first_s < MAX_SECONDS:
            return 0.0
        saved = min(MAX_SAVED_FRACTION, 1 - _seconds(dataset, indices, clock) / first_s)
    except Exception:  # of the user, whose code is called more often than it expects
        return 0.0
    finally:
        torch.set_num_threads(threads)
    return saved if saved > MIN_SAVED_FRACTION else 0.0


def _seconds(dataset: Any, indices: range, clock: Callable[[], float]) -> float:
    start = clock()
    for index in indices[:-1]:
        dataset[index]
    return clock() - start
