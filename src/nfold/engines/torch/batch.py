"""The batch of a rank in one step, its share of the global batch, and its micro-batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from nfold.engines.sampling import BatchShare, split_batch

Tensors = tuple[Tensor, ...]


class SampleTensors(NamedTuple):
    """uint8 images [n, h, w, c], int64 labels [n], int64 sample ids [n] (keys of random draws).

    ``ids`` is empty if the images are augmented already.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor


class CanvasTensors(NamedTuple):
    """Images in the upper left corners of canvases [n, s, s, 3].

    ``sizes`` int64 [n, 2] are the heights and widths of the images.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    sizes: Tensor


InputSamples = SampleTensors | CanvasTensors


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rank's part of a global batch.

    ``tensors`` is the input of a step: samples, or the ids that select them on the device.
    ``count`` of the samples are this rank's, of ``global_count`` in the step. A rank without a
    sample gets one that counts 0, because every rank takes part in the collectives.
    """

    tensors: Tensors
    epoch: int | Tensor
    count: int
    global_count: int
    sample_hash: int

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return dataclasses.replace(self, tensors=tuple(map(change, self.tensors)))

    def pin_memory(self) -> Batch:
        return self.map_tensors(lambda tensor: tensor.pin_memory())


def tensor_signature(tensor: Tensor) -> Hashable:
    """Return what a CUDA graph depends on besides a tensor's values."""
    return tensor.shape, tensor.stride(), tensor.dtype


def loss_weighted_share(
    count: int, ranks: int, *, micro_batches: int = 1, is_last: bool = True
) -> BatchShare:
    """Return the share of a rank whose loss is already weighted by its ``count`` samples."""
    return BatchShare(
        count=min(1, count),
        global_count=ranks,
        micro_batches=micro_batches,
        is_last=is_last,
        loss_is_weighted=True,
    )


class CurrentShare:
    """The current share: loaders set it, the gradient exchange reads it.

    Without a loader of nfold every rank counts the same. ``is_padding``: the current batch of the
    script is one sample that counts 0.
    """

    def __init__(self, world_size: int) -> None:
        self.share = BatchShare(count=1, global_count=world_size)
        self.is_padding = False

    def real_count(self, count: int) -> int:
        """Return ``count``, or 0 for the one sample of a padding batch."""
        return 0 if self.is_padding and count == 1 else count

    def set(self, share: BatchShare) -> None:
        self.share = share

    def is_even(self, world_size: int) -> bool:
        """Return whether the ranks' gradients are averaged without weights."""
        share = self.share
        return share.loss_is_weighted or share.count * world_size == share.global_count


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows ``start`` to ``stop`` - 1 of a batch's tensors, at least one.

    ``loss_weight`` is the weight of their mean loss in the mean over this rank's samples.
    ``gradient_weight`` is its weight in this rank's gradient, whose mean over ranks is the
    gradient of the batch.
    """

    start: int
    stop: int
    loss_weight: float
    gradient_weight: float
    share: BatchShare

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def select_rows(self, tensors: Tensors) -> Tensors:
        if self.share.micro_batches == 1:
            return tensors
        return tuple(tensor[self.start : self.stop] for tensor in tensors)


MicroBatches = tuple[MicroBatch, ...]


@lru_cache(maxsize=64)
def split_micro_batches(samples: int, rank: int, ranks: int, accumulate: int) -> MicroBatches:
    """Return the micro-batches of this rank's rows of a batch of ``samples`` over all ranks.

    There is at most one per sample of the batch. A micro-batch without a sample is the first row,
    with weight 0.
    """
    pieces = split_batch(samples, rank, ranks, min(accumulate, samples))
    counts = [len(piece) for piece in pieces]
    starts = itertools.accumulate(counts, initial=0)
    return tuple(
        MicroBatch(
            start=start if count else 0,
            stop=start + count if count else 1,
            loss_weight=count / max(1, sum(counts)),
            gradient_weight=count * ranks / samples,
            share=loss_weighted_share(
                count, ranks, micro_batches=len(counts), is_last=number == len(counts)
            ),
        )
        for number, (start, count) in enumerate(zip(starts, counts, strict=False), start=1)
    )
