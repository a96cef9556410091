"""Philox 4×32-10 in NumPy: a counter-based generator, so that draws depend on keys alone.

J. Salmon and others, Parallel random numbers: as easy as 1, 2, 3 (SC 2011). The same draws as in
``torch/philox.py``, which says more. The arithmetic is on uint64 arrays holding 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from nfold.core.plan import Plan

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


# Which samples a step computes: the order of an epoch, cut into batches and into ranks' shares.
#
# The order depends on (seed, epoch) alone. Every global batch is cut into one contiguous slice per
# rank, or one per rank and part of a step, the slices differing by at most one sample, so that a
# batch that does not divide and an incomplete last batch are used whole. The same for every
# framework; imports NumPy only.

SampleIds = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
SHUFFLE_KEY = 0
"""The operation that the order of an epoch is drawn by."""


@dataclass(frozen=True)
class RankSlice:
    """Where one rank's share of one global batch lies in the order of an epoch, the same in each.

    ``places`` is never empty: a rank without a sample gets the batch's first, of which 0 count.
    """

    positions: SampleIds
    count: int
    global_count: int


class EpochSampler:
    """One rank's cuts of every global batch, epoch by epoch, or without end across epochs."""

    def __init__(
        self, samples: int, plan: Plan, *, rank: int, ranks: int, limit: int | None = None
    ) -> None:
        batch = cast(int, plan.batch)
        starts = range(0, samples, batch)
        self._global_batches = [range(start, min(start + batch, samples)) for start in starts]
        self._ranks = ranks
        self._micro_batches = plan.accumulate
        self.slices = self.slices_of(rank)
        self._samples = samples
        self._seed = plan.seed
        self._limit = limit
        self.epoch = 0

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one epoch, the incomplete last batch counted."""
        return len(self.slices)

    def slices_of(self, rank: int) -> list[RankSlice]:
        """A rank's part of every global batch."""
        return [
            _rank_slice(whole, rank, self._ranks, self._micro_batches)
            for whole in self._global_batches
        ]

    def __len__(self) -> int:
        return self._limit or self.steps_per_epoch

    def epochs(self) -> Iterator[tuple[int, list[RankSlice]]]:
        """The epochs that one iteration goes through, the last perhaps not to its end."""
        if self._limit is None:
            yield self.epoch, self.slices
            return
        for epoch, done in enumerate(range(0, self._limit, self.steps_per_epoch)):
            yield epoch, self.slices[: self._limit - done]

    def epoch_order(self, epoch: int) -> SampleIds:
        """All ranks' samples in the order of an epoch: int64 [samples]."""
        return permutation(self._seed, epoch, self._samples, SHUFFLE_KEY)


def step_limit(plan: Plan) -> int | None:
    """Steps of a run that is measured in steps, warm-up included; None where epochs decide."""
    return None if plan.steps is None else plan.steps + (plan.warmup_steps or 0)


def _rank_slice(whole: range, rank: int, ranks: int, accumulate: int) -> RankSlice:
    own = split_batch(len(whole), rank, ranks, accumulate)
    count = sum(map(len, own))
    places = np.concatenate([np.asarray(piece) for piece in own]) if count else np.zeros(1)
    return RankSlice(whole.start + places.astype(np.int64), count, len(whole))


def split_batch(samples: int, rank: int, ranks: int, accumulate: int) -> list[range]:
    """The places in a batch of ``samples`` that are this rank's, part after part.

    A batch is cut into parts and each part into ranks, so that a part of all ranks together has
    the same samples on any number of ranks: batch norm may be over it. Ranks wait for each other
    in every part then, so all have as many: ``accumulate``, but none that no rank has a sample of.
    """
    parts = min(accumulate, samples)
    whole = parts * ranks
    own = range(rank, whole, ranks)
    return [range(piece * samples // whole, (piece + 1) * samples // whole) for piece in own]


def hash_ids(ids: SampleIds) -> Hashes:
    """A 64-bit hash of each sample id (splitmix64)."""
    bits = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def sample_hash(ids: SampleIds) -> int:
    """A 64-bit hash of a set of sample ids that does not depend on their order: their sum."""
    return int(hash_ids(ids).sum(dtype=np.uint64))
