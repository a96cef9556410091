"""Where a pass over a script's DataLoader ends: after fewer batches, as it was, or never."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.optim.lr_scheduler import OneCycleLR

from nfold.errors import Unsupported

Steps = Callable[[], int]
"""The steps of the training so far."""
COUNTING = ("lightning.pytorch.loops", "pytorch_lightning.loops")
"""Modules whose loops do not evaluate where a pass ends before the length that it had."""


class InPlaceOf:
    """What makes a loader's batches, or indices, while a subclass says where they end."""

    def __init__(self, whole: Any) -> None:
        self.batch_sampler = whole

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class Shortened(InPlaceOf):
    """Ends after ``most``. Workers are idle at the end, as at the end of a whole pass."""

    def __init__(self, whole: Any, most: int) -> None:
        super().__init__(whole)
        self._most = most

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self._most)

    def __len__(self) -> int:
        return min(self._most, len(self.batch_sampler))

    @property
    def times(self) -> float:
        """How many such passes a whole one is."""
        return len(self.batch_sampler) / len(self)


class Endless(InPlaceOf):
    """Begins again where it would end: workers go on, and what a script does after it never comes.

    ``len()`` is that of one pass. One in which no ``steps`` are made ends: whoever makes a list of
    a loader, or goes through it for its mean, waits for that.
    """

    def __init__(self, whole: Any, steps: Steps) -> None:
        super().__init__(whole)
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        before, more = self.steps(), True
        while more:
            more = False
            for drawn in self.batch_sampler:
                more = True
                yield drawn
            more = more and self.steps() > before


def shorten(loader: Any, batches: int) -> None:
    """Have every pass end after so many batches, from its next one on."""
    if shortened(loader) is not None:
        return
    if counted():
        raise Unsupported("Lightning counts an epoch's batches before it: no epoch is cut short")
    if length_of(_drawing(loader)) is None:
        raise Unsupported("how long an epoch is is not known: none is cut short")
    _replace(loader, Shortened(_drawing(loader), batches))


def prolong(loader: Any, batches: int, steps: Steps) -> None:
    """Have its next pass not end, where it is longer than so many batches, and has ``steps``.

    A loop that counts has its end anyway.
    """
    length = length_of(_drawing(loader))
    if length is not None and length > batches and not (endless(loader) or counted()):
        _replace(loader, Endless(_drawing(loader), steps))


def counted() -> bool:
    """Whether what asks for batches now has counted an epoch's before it began."""
    stack = traceback.walk_stack(sys._getframe())
    return any(str(one.f_globals.get("__name__")).startswith(COUNTING) for one, _ in stack)


def shortened(loader: Any) -> Shortened | None:
    """What ends the loader's passes, where something was put there."""
    found = _drawing(loader) if loader is not None else None
    return found if isinstance(found, Shortened) else None


def endless(loader: Any) -> bool:
    """Whether a pass over it may go on after its length."""
    return isinstance(_drawing(loader), Endless)


def own(sampler: Any) -> Any:
    """The script's, where something was put in its place."""
    return sampler.batch_sampler if isinstance(sampler, InPlaceOf) else sampler


def outlasting(usual: Any) -> Any:
    """A schedule's step: one that refuses to go on after its last step stays there."""

    def step(schedule: OneCycleLR, *args: Any, **kwargs: Any) -> None:
        if args or kwargs or schedule.last_epoch < schedule.total_steps:
            usual(schedule, *args, **kwargs)

    return step


def length_of(sized: Any) -> int | None:
    """Of a loader the batches of a pass, of a data set its samples; None where it does not know."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def whole_length(loader: Any) -> float:
    """Of a pass that nobody cuts short; one whose end nobody knows has none."""
    cut = shortened(loader)
    length = length_of(loader if cut is None else cut.batch_sampler)
    return float("inf") if length is None else length


def _drawing(loader: Any) -> Any:
    """What draws the indices of a batch, or without batches, of a sample."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _replace(loader: Any, drawing: InPlaceOf) -> None:
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(loader)[name] = drawing
