"""Faults of the exchange between ranks: all-reduces too many, bytes too many."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from calibrate import (
    LARGE_BYTES,
    SMALL_BYTES,
    TOGETHER,
    count_for,
    empty_bytes,
    repeat,
    synchronize,
    timed,
)
from settled import known, settled, tell
from torch import Tensor

LEARNT = 7
"""Steps, of a run's warm-up."""


class Synchronization:
    """So many all-reduces of one element, one after the other, in every step.

    How many is settled in the first LEARNT steps, where they stand and as many as they will be:
    alone they are faster, and so are a few.
    """

    def __init__(self, dose_ms: float, device: torch.device) -> None:
        self._dose_ms = dose_ms
        self._device = device
        self._tensor = torch.zeros(1, device=device)
        self._found: list[float] = []
        before = known("synchronization", dose_ms)
        self._left = LEARNT if before is None else 0
        self._count = TOGETHER if before is None else before

    def __call__(self) -> None:
        if self._left:
            self._learn()
            return
        for _ in range(self._count):
            dist.all_reduce(self._tensor)

    def _learn(self) -> None:
        """Time them once every rank is here; all ranks agree on a count."""
        _reduce_group(self._tensor)
        synchronize(self._device)
        begin = time.perf_counter()
        repeat(lambda: _reduce_group(self._tensor), self._count)
        synchronize(self._device)
        one_ms = (time.perf_counter() - begin) * 1e3 / self._count
        self._found.append(agreed(one_ms, self._device))
        self._count = count_for(self._dose_ms, statistics.median(self._found))
        self._left -= 1
        if not self._left:
            tell("synchronization", self._dose_ms, self._count)


def synchronization(dose_ms: float, device: torch.device) -> Callable[[], None]:
    """All-reduces of one element, where there are several ranks."""
    return Synchronization(dose_ms, device) if several() else nothing


def link(dose_ms: float, device: torch.device) -> Callable[[], None]:
    """One more all-reduce, of as many bytes as take so long beyond one element."""
    if not several():
        return nothing
    tensor = empty_bytes(settled("link", dose_ms, lambda: _bytes_for(dose_ms, device)), device)

    def send() -> None:
        dist.all_reduce(tensor)

    return send


def _bytes_for(dose_ms: float, device: torch.device) -> int:
    small, large = (_reduce_ms(size, device) for size in (SMALL_BYTES, LARGE_BYTES))
    ms_per_byte = max((large - small) / (LARGE_BYTES - SMALL_BYTES), 1e-9)
    return min(int(dose_ms / ms_per_byte), 1 << 32)


def _reduce_ms(size: int, device: torch.device) -> float:
    tensor = empty_bytes(size, device)
    return agreed(timed(lambda: _reduce_group(tensor), device), device)


def agreed(milliseconds: float, device: torch.device) -> float:
    """The mean over all ranks: each must make the same number of calls."""
    tensor = torch.tensor([milliseconds], device=device)
    _reduce_group(tensor)
    return tensor.item() / dist.get_world_size()


def _reduce_group(tensor: Tensor) -> None:
    """An all-reduce by the group itself: who replaces ``dist.all_reduce`` leaves it alone."""
    group = dist.group.WORLD
    assert group is not None
    group.allreduce([tensor]).wait()


def several() -> bool:
    """Whether this process exchanges anything with others."""
    return dist.is_initialized() and dist.get_world_size() > 1


def nothing() -> None:
    """What a fault does where it does not apply."""
