"""Which samples each rank gets in each step: the same global batches on any number of devices.

The order depends on (seed, epoch) alone. A global batch is cut into parts × ranks contiguous
slices whose lengths differ by at most one, so that a batch that does not divide and an
incomplete last batch are used whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nfold.frameworks.philox import permutation
from nfold.frameworks.stream import SHUFFLE_KEY
from nfold.frameworks.torch.share import BatchShare


@dataclass(frozen=True)
class SampleSlice:
    """Sample numbers ``first`` to ``last`` - 1 of an epoch's order, and what they count for.

    A rank without a sample in a training step gets one that counts nothing, because every rank
    must take part in the exchange; ``padded`` says so.
    """

    first: int
    last: int
    share: BatchShare
    is_padding: bool = False


@dataclass(frozen=True, kw_only=True)
class BatchDivision:
    """How steps are divided: ``batch`` samples a step, over ``ranks``, in ``parts`` each."""

    batch: int
    rank: int
    ranks: int
    micro_batches: int = 1
    drop_last: bool = False

    def steps_per_epoch(self, samples: int) -> int:
        """Steps in an epoch of so many samples."""
        whole = samples / self.batch
        return math.floor(whole) if self.drop_last else math.ceil(whole)

    def split(self, start: int, count: int) -> Iterator[SampleSlice]:
        """This rank's slices of the global batch of ``count`` samples from ``start`` on."""
        pieces = self.micro_batches * self.ranks
        for part in range(self.micro_batches):
            place = part * self.ranks + self.rank
            first, last = place * count // pieces, (place + 1) * count // pieces
            share = BatchShare(
                count=last - first,
                global_count=count,
                micro_batches=self.micro_batches,
                is_last=part == self.micro_batches - 1,
            )
            empty = first == last
            if empty:
                first, last = 0, 1
            yield SampleSlice(start + first, start + last, share, is_padding=empty)

    def epoch_slices(self, samples: int, skip: int = 0) -> Iterator[SampleSlice]:
        """This rank's slices of a whole epoch, from step ``skip`` on."""
        for step in range(skip, self.steps_per_epoch(samples)):
            start = step * self.batch
            yield from self.split(start, min(self.batch, samples - start))


def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """The order of an epoch: int64 [samples], the same on every rank."""
    if not shuffle:
        return torch.arange(samples)
    return torch.from_numpy(permutation(seed, epoch, samples, SHUFFLE_KEY))
