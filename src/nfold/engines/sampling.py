"""Random draws and the division of epochs into batches, the same in every framework.

Philox 4×32-10 is a counter-based generator: draws depend on keys only (J. Salmon and others,
Parallel random numbers: as easy as 1, 2, 3, SC 2011). Its arithmetic is on 64-bit arrays that hold
32-bit values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from nfold.core.plan import Plan

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
ROUNDS = 10

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]


Array = TypeVar("Array", bound=Any)


def philox(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> list[Array]:
    """Return four arrays of 32-bit values for counters of four arrays and a key of two words.

    The arrays are of uint64 in NumPy or of int64 in PyTorch, which has few operations on unsigned
    types. The shapes of the counters broadcast together.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((second >> 32) & MASK) ^ c1 ^ k0, second & MASK
        c2, c3 = ((first >> 32) & MASK) ^ c3 ^ k1, first & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return [c0, c1, c2, c3]


def draws(seed: int, epoch: int, ids: Ids, operation: int) -> list[Words]:
    """Return four independent 32-bit draws per sample id [n]; ``operation`` is their key."""
    bits = ids.astype(np.uint64)
    low, high = bits & np.uint64(MASK), bits >> np.uint64(32)
    epochs, operations = (np.full(len(ids), n & MASK, dtype=np.uint64) for n in (epoch, operation))
    return philox((low, high, epochs, operations), (seed & MASK, (seed >> 32) & MASK))


def uniform_int(draw: Words, limit: int | Ids) -> Ids:
    """Map 32-bit draws to whole numbers 0 to ``limit`` - 1 (Lemire's multiplication, 2019)."""
    return ((draw * np.asarray(limit, np.uint64)) >> np.uint64(32)).astype(np.int64)


def permutation(seed: int, epoch: int, n: int, operation: int) -> Ids:
    """Return a shuffle of 0 to n - 1, the same in every framework and on any number of devices."""
    first, second, _, _ = draws(seed, epoch, np.arange(n), operation)
    order: Ids = np.argsort((first << np.uint64(31)) ^ second, kind="stable")
    return order


# The order of an epoch depends on seed and epoch only. Every global batch is cut into one contiguous
# slice per rank and micro-batch. Slices differ by at most one sample: a batch that does not divide
# and an incomplete last batch are used whole.

SampleIds = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
SHUFFLE_KEY = 0  # key of the draws of an epoch's order


@dataclass(frozen=True)
class RankSlice:
    """One rank's part of one global batch, as positions in the order of an epoch.

    ``positions`` is never empty: a rank without a sample gets the first of the batch, with
    ``count`` 0.
    """

    positions: SampleIds
    count: int
    global_count: int


class EpochSampler:
    """One rank's slices of every global batch: epoch by epoch, or up to ``limit`` steps."""

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
        return len(self.slices)

    def slices_of(self, rank: int) -> list[RankSlice]:
        slices = []
        for whole in self._global_batches:
            micro_batches = min(self._micro_batches, len(whole))
            pieces = split_batch(len(whole), rank, self._ranks, micro_batches)
            positions = np.concatenate([*map(np.asarray, pieces)]).astype(np.int64)
            counted = positions if len(positions) else np.zeros(1, np.int64)
            slices.append(RankSlice(whole.start + counted, len(positions), len(whole)))
        return slices

    def __len__(self) -> int:
        return self._limit or self.steps_per_epoch

    def epochs(self) -> Iterator[tuple[int, list[RankSlice]]]:
        """Yield the epochs of one iteration; ``limit`` may cut the last."""
        if self._limit is None:
            yield self.epoch, self.slices
            return
        for epoch, done in enumerate(range(0, self._limit, self.steps_per_epoch)):
            yield epoch, self.slices[: self._limit - done]

    def epoch_order(self, epoch: int) -> SampleIds:
        """Return the samples of all ranks in the order of an epoch: int64 [samples]."""
        return permutation(self._seed, epoch, self._samples, SHUFFLE_KEY)


def step_limit(plan: Plan) -> int | None:
    """Return the steps of a run measured in steps, with warm-up; None if epochs decide."""
    return None if plan.steps is None else plan.steps + (plan.warmup_steps or 0)


def split_batch(samples: int, rank: int, ranks: int, micro_batches: int) -> list[range]:
    """Return the positions in a batch of ``samples`` of this rank's micro-batches.

    A batch is cut into micro-batches and each of these into ranks, so that a micro-batch of all
    ranks has the same samples on any number of ranks: synchronized batch norm depends on it.
    """
    pieces = micro_batches * ranks
    return [
        range(piece * samples // pieces, (piece + 1) * samples // pieces)
        for piece in range(rank, pieces, ranks)
    ]


def hash_ids(ids: SampleIds) -> Hashes:
    """Return a 64-bit hash of each sample id (splitmix64)."""
    bits = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def sample_hash(ids: SampleIds) -> int:
    """Return a 64-bit hash of a set of sample ids: the sum of their hashes."""
    return int(hash_ids(ids).sum(dtype=np.uint64))
