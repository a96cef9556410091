"""Philox 4×32-10: a counter-based generator, so that draws depend on keys and on nothing else.

J. Salmon and others, Parallel random numbers: as easy as 1, 2, 3 (SC 2011). A draw is a pure
function of (seed, epoch, sample id, operation), the same on every device and for any number
of devices. The arithmetic is on int64 tensors holding values of 32 bits, since PyTorch has
few operations on unsigned ones; it runs on any device and without a Python loop over samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nfold.frameworks.philox import MASK, MULTIPLIERS, ROUNDS, WEYL


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Four int64 tensors of 32-bit values for counters of four int64 tensors and a key of two.

    The counters may have different shapes that broadcast together; the results have the common
    one.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return [c0, c1, c2, c3]


def _multiply(value: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 × 32 bit product; int64 wraps, which keeps all 64 bits."""
    product = value * factor
    return (product >> 32) & MASK, product & MASK


def draws(seed: int, epoch: int | Tensor, ids: Tensor, operation: int | Tensor) -> list[Tensor]:
    """Four independent 32-bit draws per sample id: int64 tensors of the shape of ``ids``.

    ``operation`` tells apart what the draws are for; the key holds the 64 bits of the seed.
    Operations [k, 1] give draws [k, n] for ids [n] in one call. An epoch that is an int64 tensor
    of no dimensions on the device of ``ids`` is read when the arithmetic runs, so that a CUDA
    graph that was captured in one epoch draws the next one's numbers in the next.
    """
    low, high = ids & MASK, (ids >> 32) & MASK
    counter = (low, high, _word(epoch, ids.device), _word(operation, ids.device))
    return philox(counter, (seed & MASK, (seed >> 32) & MASK))


def _word(value: int | Tensor, device: torch.device) -> Tensor:
    """The low 32 bits; an int is filled in on the device, since copying one there waits."""
    if isinstance(value, Tensor):
        return value & MASK
    return torch.full((), value & MASK, dtype=torch.int64, device=device)


def uniform_int(draw: Tensor, limit: int | Tensor) -> Tensor:
    """Map 32-bit draws to whole numbers 0 to ``limit`` - 1 (Lemire's multiplication, 2019)."""
    return (draw * limit) >> 32
