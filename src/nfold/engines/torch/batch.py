"""What a rank gets in one step, wherever it comes from."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from nfold.engines.sampling import split_batch

Tensors = tuple[Tensor, ...]


class SampleTensors(NamedTuple):
    """uint8 images [n, h, w, c], int64 labels [n], and the int64 ids [n] that draws are keyed by.

    ``ids`` is empty where the images are augmented already.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor


class CanvasTensors(NamedTuple):
    """Samples whose images do not fill their canvases [n, s, s, 3].

    ``places`` int64 [n, 2] are the height and width of what lies in the upper left corner.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    sizes: Tensor


InputSamples = SampleTensors | CanvasTensors
"""What is prepared for a model."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rank's part of a global batch.

    ``tensors`` is what a step reads: samples, or the ids by which it selects them on the device.
    ``count`` of them are this rank's samples, of ``global_count`` in the step; a rank without
    a sample gets one that counts 0, because every rank must take part in the exchange.
    """

    tensors: Tensors
    epoch: int | Tensor
    count: int
    global_count: int
    sample_hash: int

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with ``move`` applied to its tensors."""
        return dataclasses.replace(self, tensors=tuple(map(change, self.tensors)))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; DataLoader calls this."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())


def tensor_signature(tensor: Tensor) -> Hashable:
    """What a graph depends on besides a tensor's values."""
    return tensor.shape, tensor.stride(), tensor.dtype


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """``count`` of the ``global_count`` samples of one optimizer step.

    Under gradient accumulation a step has several ``parts`` per rank; ``last`` is the one after
    which gradients are exchanged and the optimizer may step. ``weighted``: the loss is
    weighted by its samples already, so that from there on all ranks count the same.
    """

    count: int
    global_count: int
    micro_batches: int = 1
    is_last: bool = True
    loss_is_weighted: bool = False

    @property
    def weight(self) -> float:
        """What this part's mean gradient counts in the mean over the whole batch."""
        return self.count / self.global_count


def loss_weighted_share(
    count: int, ranks: int, *, micro_batches: int = 1, is_last: bool = True
) -> BatchShare:
    """The share of a rank whose loss is weighted by its ``count`` samples already."""
    return BatchShare(
        count=min(1, count),
        global_count=ranks,
        micro_batches=micro_batches,
        is_last=is_last,
        loss_is_weighted=True,
    )


class CurrentShare:
    """The current share: loaders write it, the gradient exchange reads it.

    Before any loader of nfold has spoken, every rank counts the same. ``pads``: the batch that
    the script has in hand is one sample that only keeps this rank in step, and counts nothing.
    """

    def __init__(self, world_size: int) -> None:
        self.share = BatchShare(count=1, global_count=world_size)
        self.is_padding = False

    def real_count(self, count: int) -> int:
        """How many of ``count`` samples in hand count: none of a padded batch, which is one."""
        return 0 if self.is_padding and count == 1 else count

    def set(self, share: BatchShare) -> None:
        """A loader hands out this share next."""
        self.share = share

    def is_even(self, world_size: int) -> bool:
        """Whether ranks' gradients are to be averaged as they are; the same on every rank."""
        share = self.share
        return share.loss_is_weighted or share.count * world_size == share.global_count


# The parts of a step under gradient accumulation: which rows of a batch, and what they count.
#
# A rank computes its share of a global batch part after part, so that memory holds the activations
# of one part only; the gradients of all parts together are those of the whole share.


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows ``start`` to ``stop`` - 1 of a batch's tensors, at least one of them.

    ``of_loss`` is what their mean loss counts in the mean over this rank's samples,
    ``of_gradient`` what it counts in this rank's gradient, whose mean over ranks is that of the
    batch. ``share`` says the same to those who look at gradients and statistics.
    """

    start: int
    stop: int
    loss_weight: float
    gradient_weight: float
    share: BatchShare

    @property
    def rows(self) -> int:
        """Samples that are computed, those that pad among them."""
        return self.stop - self.start

    def select_rows(self, tensors: Tensors) -> Tensors:
        """The part's rows of every tensor of a batch."""
        if self.share.micro_batches == 1:
            return tensors
        return tuple(tensor[self.start : self.stop] for tensor in tensors)


MicroBatches = tuple[MicroBatch, ...]


@lru_cache(maxsize=64)
def split_micro_batches(samples: int, rank: int, ranks: int, accumulate: int) -> MicroBatches:
    """The parts of this rank's rows of a batch of ``samples`` over all ranks.

    Where it has none for a part, that is its first row, which counts 0.
    """
    counts = [len(piece) for piece in split_batch(samples, rank, ranks, accumulate)]
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
