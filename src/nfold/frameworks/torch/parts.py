"""The parts of a step under gradient accumulation: which rows of a batch, and what they count.

A rank computes its share of a global batch part after part, so that memory holds the activations
of one part only; the gradients of all parts together are those of the whole share.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from nfold.frameworks.stream import pieces
from nfold.frameworks.torch.batch import Tensors
from nfold.frameworks.torch.share import Share, weighted


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows ``start`` to ``stop`` - 1 of a batch's tensors, at least one of them.

    ``of_loss`` is what their mean loss counts in the mean over this rank's samples,
    ``of_gradient`` what it counts in this rank's gradient, whose mean over ranks is that of the
    batch. ``share`` says the same to those who look at gradients and statistics.
    """

    start: int
    stop: int
    of_loss: float
    of_gradient: float
    share: Share

    @property
    def rows(self) -> int:
        """Samples that are computed, those that pad among them."""
        return self.stop - self.start

    def of(self, tensors: Tensors) -> Tensors:
        """The part's rows of every tensor of a batch."""
        if self.share.parts == 1:
            return tensors
        return tuple(tensor[self.start : self.stop] for tensor in tensors)


Parts = tuple[Part, ...]


@lru_cache(maxsize=64)
def cut(samples: int, rank: int, ranks: int, accumulate: int) -> Parts:
    """The parts of this rank's rows of a batch of ``samples`` over all ranks.

    Where it has none for a part, that is its first row, which counts 0.
    """
    counts = [len(piece) for piece in pieces(samples, rank, ranks, accumulate)]
    starts = itertools.accumulate(counts, initial=0)
    return tuple(
        Part(
            start=start if count else 0,
            stop=start + count if count else 1,
            of_loss=count / max(1, sum(counts)),
            of_gradient=count * ranks / samples,
            share=weighted(count, ranks, parts=len(counts), last=number == len(counts)),
        )
        for number, (start, count) in enumerate(zip(starts, counts, strict=False), start=1)
    )
