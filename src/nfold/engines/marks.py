"""Marks in a script: the end of a step, and the batches that feed the training.

They do nothing outside ``nfold explain``. An instrumented rank sets a receiver.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

Batch = TypeVar("Batch")


class MarkReceiver(Protocol):
    def mark_step(self) -> None: ...

    def mark_batches(self, iterable: Iterable[Batch]) -> Iterable[Batch]: ...


_receiver: MarkReceiver | None = None


def set_receiver(receiver: MarkReceiver | None) -> None:
    global _receiver  # one script per process
    _receiver = receiver


def mark_step() -> None:
    """Mark the end of a training step, for ``nfold explain``. Does nothing outside it.

        for x, y in batches:
            loss = loss_function(model(x), y)
            loss.backward()
            update(model)  # your own update, not a torch optimizer
            nfold.mark_step()

    Call it where no torch optimizer steps exactly once per training step: after an update without a
    torch optimizer, or after several optimizer steps that belong together. From the first call on,
    only calls end steps. If several optimizer steps come before the first call, call it once before
    the training loop as well.
    """
    if _receiver is not None:
        _receiver.mark_step()


def batches(iterable: Iterable[Batch]) -> Iterable[Batch]:
    """Mark what feeds the training, for ``nfold explain``. Returns ``iterable`` itself outside it.

        for x, y in nfold.batches(read_batches("train")):
            ...

    Use it for batches that neither a DataLoader nor a function of yours returns, and for an iterator
    that repeats a DataLoader without end. ``nfold explain`` then measures how long the training
    waits for each batch, replays batches to measure what input costs, and treats the end of the
    iterable as the end of an epoch. A DataLoader inside the iterable is a part of it. A DataLoader
    itself needs no mark.
    """
    return iterable if _receiver is None else _receiver.mark_batches(iterable)
