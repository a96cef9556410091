"""The parts of a step under gradient accumulation: which rows of a batch, and what they count.

A rank computes its share of a global batch part after part, so that memory holds the activations
of one part only; the gradients of all parts together are those of the whole share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
def cut(count: int, global_count: int, ranks: int, accumulate: int) -> Parts:
    """The parts of this rank's ``count`` of ``global_count`` samples, at most ``accumulate``.

    They differ by at most one sample and are as many on every rank, because ranks wait for each
    other in every part where batch norm is synchronised: as many as the largest share has samples
    for. Where a rank has none for a part, that is the batch's first row, which counts 0.
    """
    parts = min(accumulate, -(-global_count // ranks))
    return tuple(_part(number, parts, count, global_count, ranks) for number in range(parts))


def _part(number: int, parts: int, count: int, global_count: int, ranks: int) -> Part:
    start, stop = _bounds(number, parts, count)
    own = stop - start
    return Part(
        start=start if own else 0,
        stop=stop if own else 1,
        of_loss=own / max(1, count),
        of_gradient=own * ranks / global_count,
        share=weighted(own, ranks, parts=parts, last=number == parts - 1),
    )


def _bounds(number: int, parts: int, count: int) -> tuple[int, int]:
    return number * count // parts, (number + 1) * count // parts


def sizes(count: int, accumulate: int) -> frozenset[int]:
    """The numbers of rows that the parts of ``count`` samples have: one, or two."""
    parts = min(accumulate, count)
    bounds = (_bounds(number, parts, count) for number in range(parts))
    return frozenset(stop - start for start, stop in bounds)
