"""Philox 4×32-10 in NumPy: a counter-based generator, so that draws depend on keys alone.

J. Salmon and others, Parallel random numbers: as easy as 1, 2, 3 (SC 2011). The same draws as in
``torch/philox.py``, which says more. The arithmetic is on uint64 arrays holding 32 bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
ROUNDS = 10

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> list[Words]:
    """Four arrays of 32-bit values for counters of four arrays and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1 = (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0), second & np.uint64(MASK)
        c2, c3 = (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1), first & np.uint64(MASK)
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return [c0, c1, c2, c3]


def draws(seed: int, epoch: int, ids: Ids, operation: int) -> list[Words]:
    """Four independent 32-bit draws per sample id [n]; ``operation`` tells what they are for."""
    bits = ids.astype(np.uint64)
    low, high = bits & np.uint64(MASK), bits >> np.uint64(32)
    rest = (_word(epoch, len(ids)), _word(operation, len(ids)))
    return philox((low, high, *rest), (seed & MASK, (seed >> 32) & MASK))


def _word(value: int, count: int) -> Words:
    return np.full(count, value & MASK, dtype=np.uint64)


def uniform_int(draw: Words, limit: int | Ids) -> Ids:
    """Map 32-bit draws to whole numbers 0 to ``limit`` - 1 (Lemire's multiplication, 2019)."""
    return ((draw * np.asarray(limit, np.uint64)) >> np.uint64(32)).astype(np.int64)


def permutation(seed: int, epoch: int, n: int, operation: int) -> Ids:
    """A shuffle of 0 to n - 1 that every framework and number of devices agrees on."""
    first, second, _, _ = draws(seed, epoch, np.arange(n), operation)
    order: Ids = np.argsort((first << np.uint64(31)) ^ second, kind="stable")
    return order
