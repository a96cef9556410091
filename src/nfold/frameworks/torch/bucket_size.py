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

PROBED_BYTES = (2**16, 2**20, 2**23)
"""Bytes that are timed."""
PROBE_REPEATS = 5
LATENCY_FRACTION = 0.1
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES = 2**20, 2**26


@cache
def measure_bucket_bytes(device: torch.device, world_size: int) -> int:
    """The bucket size for this process group, the same on every rank; all ranks must call it.

    Measured once, in some tens of milliseconds on GPUs and on a host's loopback.
    """
    if world_size == 1:
        return MAX_BUCKET_BYTES
    seconds = [_time_all_reduce(size, device) for size in PROBED_BYTES]
    chosen = torch.tensor(choose_bucket_bytes(PROBED_BYTES, seconds), device=device)
    dist.broadcast(chosen, src=0)
    return int(chosen.item())


def choose_bucket_bytes(sizes: tuple[int, ...], seconds: list[float]) -> int:
    """The bytes at which the latency of a line through the measurements is OVERHEAD of the time."""
    slope, latency = statistics.linear_regression(sizes, seconds)
    if slope <= 0:
        return MAX_BUCKET_BYTES
    wanted = max(0.0, latency) * (1 - LATENCY_FRACTION) / LATENCY_FRACTION / slope
    return round(min(max(wanted, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES))


def _time_all_reduce(size: int, device: torch.device) -> float:
    values = torch.zeros(size // 4, device=device)
    taken = []
    for _ in range(PROBE_REPEATS + 1):
        _synchronize(device)
        started = time.perf_counter()
        dist.all_reduce(values)
        _synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
