"""Operations that are timed in this process, so that a count or a size of them is milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

PROBES, TOGETHER = 5, 5
MOST = 5000
"""A count of operations a step beyond which the time of one was surely not measured."""
SMALL_BYTES, LARGE_BYTES = 1 << 20, 1 << 24


def timed(act: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one among several: the median of PROBES after two to warm up."""
    found = []
    for _ in range(PROBES + 2):
        begin = time.perf_counter()
        repeat(act, TOGETHER)
        synchronize(device)
        found.append((time.perf_counter() - begin) * 1e3 / TOGETHER)
    return sorted(found[2:])[PROBES // 2]


def count_for(dose_ms: float, one_ms: float) -> int:
    """How many operations of ``one_ms`` make ``dose_ms``: at least one, at most MOST."""
    return max(1, min(round(dose_ms / max(one_ms, 1e-6)), MOST))


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_bytes(size: int, device: torch.device | str = "cpu") -> Tensor:
    """So many bytes, in single precision."""
    return torch.zeros(max(1, size // 4), device=device)


def repeat(act: Callable[[], object], count: int) -> None:
    """Act so many times."""
    for _ in range(count):
        act()
