"""The parts of a step under gradient accumulation: which rows of a batch, and what they count.

A rank computes its share of a global batch part after part, so that memory holds the activations
of one part only; the gradients of all parts together are those of the whole share.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from nfold.frameworks.stream import split_batch
from nfold.frameworks.torch.batch import Tensors
from nfold.frameworks.torch.share import BatchShare, loss_weighted_share


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
