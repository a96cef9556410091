"""A core or a GPU that works for so long, and on nothing."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch

CUDA: Any = torch.cuda
"""Typed in one version of PyTorch, untyped in another."""


def spin(milliseconds: float) -> None:
    """Keep this core busy, as real work does."""
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        pass


def busy(milliseconds: float, device: torch.device) -> None:
    """Keep a device busy: a GPU by a kernel that counts cycles, a CPU by its core."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            CUDA._sleep(int(milliseconds * cycles_per_ms(device.index or 0)))
    else:
        spin(milliseconds)


@cache
def cycles_per_ms(index: int) -> float:
    """Of the kernel that counts cycles, by events, once the clock has risen."""
    begin, end = (CUDA.Event(enable_timing=True) for _ in range(2))
    cycles = 20_000_000
    for _ in range(3):
        begin.record()
        CUDA._sleep(cycles)
        end.record()
        torch.cuda.synchronize(index)
    return cycles / float(begin.elapsed_time(end))
