"""How large buckets of gradients should be here: from the time that an all-reduce takes.

An all-reduce of n bytes takes about ``latency + n / bandwidth``. Small buckets start early, but
each pays the latency; a bucket is as large as makes the latency a tenth of its time.
"""

from __future__ import annotations

import statistics
import time
from functools import cache

import torch
import torch.distributed as dist

SIZES = (2**16, 2**20, 2**23)
"""Bytes that are timed."""
REPEATS = 5
OVERHEAD = 0.1
SMALLEST, LARGEST = 2**20, 2**26


@cache
def measured_bucket_bytes(device: torch.device, world_size: int) -> int:
    """The bucket size for this process group, the same on every rank; all ranks must call it.

    Measured once, in some tens of milliseconds on GPUs and on a host's loopback.
    """
    if world_size == 1:
        return LARGEST
    seconds = [_seconds(size, device) for size in SIZES]
    chosen = torch.tensor(bucket_bytes(SIZES, seconds), device=device)
    dist.broadcast(chosen, src=0)
    return int(chosen.item())


def bucket_bytes(sizes: tuple[int, ...], seconds: list[float]) -> int:
    """The bytes at which the latency of a line through the measurements is OVERHEAD of the time."""
    slope, latency = statistics.linear_regression(sizes, seconds)
    if slope <= 0:
        return LARGEST
    wanted = max(0.0, latency) * (1 - OVERHEAD) / OVERHEAD / slope
    return round(min(max(wanted, SMALLEST), LARGEST))


def _seconds(size: int, device: torch.device) -> float:
    values = torch.zeros(size // 4, device=device)
    taken = []
    for _ in range(REPEATS + 1):
        _finish(device)
        started = time.perf_counter()
        dist.all_reduce(values)
        _finish(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
