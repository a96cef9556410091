"""Random draws and the division of epochs into batches, the same in every framework.

Philox 4×32-10 is a counter-based generator: draws depend on keys only (J. Salmon and others,
Parallel random numbers: as easy as 1, 2, 3, SC 2011). Its arithmetic is on 64-bit arrays that hold
32-bit values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """``count`` of the ``global_count`` samples of one optimizer step.

    Under gradient accumulation a step has several micro-batches per rank. Gradients are exchanged
    after the last. ``loss_is_weighted``: the loss is already weighted by its samples, and all
    ranks count the same.
    """

    count: int
    global_count: int
    micro_batches: int = 1
    is_last: bool = True
    loss_is_weighted: bool = False

    @property
    def weight(self) -> float:
        """The weight of this micro-batch's mean gradient in the mean over the batch."""
        return self.count / self.global_count


@dataclass(frozen=True)
class RankSlice:
    """One rank's part of a global batch, or one micro-batch of it, and its share of the step.

    ``positions`` in the order of an epoch are never empty: a rank without a sample gets the first
    of the batch, which counts 0, because every rank must take part in the exchange.
    """

    positions: SampleIds
    share: BatchShare

    @property
    def is_padding(self) -> bool:
        return self.share.count == 0


@dataclass(frozen=True, kw_only=True)
class BatchDivision:
    """Divides ``batch`` samples per step over ``ranks``, in ``micro_batches`` each."""

    batch: int
    rank: int
    ranks: int
    micro_batches: int = 1
    drop_last: bool = False

    def steps_per_epoch(self, samples: int) -> int:
        whole = samples / self.batch
        return math.floor(whole) if self.drop_last else math.ceil(whole)

    def global_batches(self, samples: int, skip: int = 0) -> Iterator[range]:
        """Yield the positions of each step's samples of all ranks, from step ``skip`` on."""
        for step in range(skip, self.steps_per_epoch(samples)):
            yield range(samples)[step * self.batch : (step + 1) * self.batch]

    def split(self, global_batch: range) -> Iterator[RankSlice]:
        """Yield this rank's micro-batches of a global batch."""
        pieces = split_batch(len(global_batch), self.rank, self.ranks, self.micro_batches)
        for number, piece in enumerate(pieces, start=1):
            share = BatchShare(
                count=len(piece),
                global_count=len(global_batch),
                micro_batches=self.micro_batches,
                is_last=number == self.micro_batches,
            )
            own = piece or range(1)
            yield RankSlice(global_batch.start + np.arange(own.start, own.stop), share)

    def epoch_slices(self, samples: int, skip: int = 0) -> Iterator[RankSlice]:
        """Yield this rank's micro-batches of an epoch, from step ``skip`` on."""
        for global_batch in self.global_batches(samples, skip):
            yield from self.split(global_batch)

    def rank_slice(self, global_batch: range) -> RankSlice:
        """Return this rank's part of a global batch, with at most one micro-batch per sample."""
        micro_batches = min(self.micro_batches, len(global_batch))
        parts = list(replace(self, micro_batches=micro_batches).split(global_batch))
        counted = [part.positions for part in parts if not part.is_padding]
        share = BatchShare(count=sum(map(len, counted)), global_count=len(global_batch))
        return RankSlice(np.concatenate(counted or [parts[0].positions]), share)


class EpochSampler:
    """One rank's slices of every global batch: epoch by epoch, or up to ``limit`` steps."""

    def __init__(
        self, samples: int, plan: Plan, *, rank: int, ranks: int, limit: int | None = None
    ) -> None:
        self._division = BatchDivision(
            batch=cast(int, plan.batch), rank=rank, ranks=ranks, micro_batches=plan.accumulate
        )
        self._samples = samples
        self.slices = self.slices_of(rank)
        self._seed = plan.seed
        self._limit = limit
        self.epoch = 0

    @property
    def steps_per_epoch(self) -> int:
        return len(self.slices)

    def slices_of(self, rank: int) -> list[RankSlice]:
        division = replace(self._division, rank=rank)
        return [division.rank_slice(batch) for batch in division.global_batches(self._samples)]

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
        return epoch_order(self._samples, seed=self._seed, epoch=epoch)


def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> SampleIds:
    """Return the samples of all ranks in the order of an epoch: int64 [samples]."""
    return permutation(seed, epoch, samples, SHUFFLE_KEY) if shuffle else np.arange(samples)


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
