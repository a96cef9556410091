"""Which part of a global batch this rank works on now: what weights its gradient."""

from __future__ import annotations

from dataclasses import dataclass


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
