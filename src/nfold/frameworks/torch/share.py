"""Which part of a global batch this rank works on now: what weights its gradient."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Share:
    """``count`` of the ``global_count`` samples of one optimizer step.

    Under gradient accumulation a step has several ``parts`` per rank; ``last`` is the one after
    which gradients are exchanged and the optimizer may step.
    """

    count: int
    global_count: int
    parts: int = 1
    last: bool = True

    @property
    def weight(self) -> float:
        """What this part's mean gradient counts in the mean over the whole batch."""
        return self.count / self.global_count


class Ledger:
    """The current share: loaders write it, the gradient exchange reads it.

    Before any loader of nfold has spoken, every rank counts the same.
    """

    def __init__(self, world_size: int) -> None:
        self._ranks = world_size
        self.share = Share(count=1, global_count=world_size)

    def begin(self, share: Share) -> None:
        """A loader hands out this share next."""
        self.share = share

    def begin_weighted(self, count: int) -> None:
        """This rank has ``count`` samples next, and its loss is weighted by them already.

        So all ranks count the same from there on, but for one that has none.
        """
        self.share = Share(count=min(1, count), global_count=self._ranks)

    def even(self, world_size: int) -> bool:
        """Whether this rank's weight in a step is one over the number of ranks."""
        return self.share.count * world_size == self.share.global_count
