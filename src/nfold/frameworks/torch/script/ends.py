"""Where a pass over a script's DataLoader ends: after fewer batches, as it was, or never."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.optim.lr_scheduler import OneCycleLR

from nfold.errors import Unsupported

StepCounter = Callable[[], int]
"""The steps of the training so far."""
LENGTH_READING_MODULES = ("lightning.pytorch.loops", "pytorch_lightning.loops")
"""Modules whose loops do not evaluate where a pass ends before the length that it had."""


class SamplerWrapper:
    """What makes a loader's batches, or indices, while a subclass says where they end."""

    def __init__(self, sampler: Any) -> None:
        self.batch_sampler = sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class TruncatedSampler(SamplerWrapper):
    """Ends after ``most``. Workers are idle at the end, as at the end of a whole pass."""

    def __init__(self, sampler: Any, max_batches: int) -> None:
        super().__init__(sampler)
        self._max_batches = max_batches

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self._max_batches)

    def __len__(self) -> int:
        return min(self._max_batches, len(self.batch_sampler))

    @property
    def passes_per_epoch(self) -> float:
        """How many such passes a whole one is."""
        return len(self.batch_sampler) / len(self)


class RepeatingSampler(SamplerWrapper):
    """Begins again where it would end: workers go on, and what a script does after it never comes.

    ``len()`` is that of one pass. One in which no ``steps`` are made ends: whoever makes a list of
    a loader, or goes through it for its mean, waits for that.
    """

    def __init__(self, sampler: Any, steps: StepCounter) -> None:
        super().__init__(sampler)
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        before, more = self.steps(), True
        while more:
            more = False
            for drawn in self.batch_sampler:
                more = True
                yield drawn
            more = more and self.steps() > before


def truncate_epochs(loader: Any, batches: int) -> None:
    """Have every pass end after so many batches, from its next one on."""
    if truncated_sampler(loader) is not None:
        return
    if epoch_length_is_read_ahead():
        raise Unsupported("Lightning counts an epoch's batches before it: no epoch is cut short")
    if length_or_none(_index_source(loader)) is None:
        raise Unsupported("how long an epoch is is not known: none is cut short")
    _set_index_source(loader, TruncatedSampler(_index_source(loader), batches))


def repeat_epochs(loader: Any, batches: int, steps: StepCounter) -> None:
    """Have its next pass not end, where it is longer than so many batches, and has ``steps``.

    A loop that counts has its end anyway.
    """
    length = length_or_none(_index_source(loader))
    if (
        length is not None
        and length > batches
        and not (repeats_epochs(loader) or epoch_length_is_read_ahead())
    ):
        _set_index_source(loader, RepeatingSampler(_index_source(loader), steps))


def epoch_length_is_read_ahead() -> bool:
    """Whether what asks for batches now has counted an epoch's before it began."""
    stack = traceback.walk_stack(sys._getframe())
    return any(
        str(one.f_globals.get("__name__")).startswith(LENGTH_READING_MODULES) for one, _ in stack
    )


def truncated_sampler(loader: Any) -> TruncatedSampler | None:
    """What ends the loader's passes, where something was put there."""
    found = _index_source(loader) if loader is not None else None
    return found if isinstance(found, TruncatedSampler) else None


def repeats_epochs(loader: Any) -> bool:
    """Whether a pass over it may go on after its length."""
    return isinstance(_index_source(loader), RepeatingSampler)


def script_sampler(sampler: Any) -> Any:
    """The script's, where something was put in its place."""
    return sampler.batch_sampler if isinstance(sampler, SamplerWrapper) else sampler


def wrap_one_cycle_step(usual: Any) -> Any:
    """A schedule's step: one that refuses to go on after its last step stays there."""

    def step(schedule: OneCycleLR, *args: Any, **kwargs: Any) -> None:
        if args or kwargs or schedule.last_epoch < schedule.total_steps:
            usual(schedule, *args, **kwargs)

    return step


def length_or_none(sized: Any) -> int | None:
    """Of a loader the batches of a pass, of a data set its samples; None where it does not know."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def full_epoch_length(loader: Any) -> float:
    """Of a pass that nobody cuts short; one whose end nobody knows has none."""
    cut = truncated_sampler(loader)
    length = length_or_none(loader if cut is None else cut.batch_sampler)
    return float("inf") if length is None else length


def _index_source(loader: Any) -> Any:
    """What draws the indices of a batch, or without batches, of a sample."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _set_index_source(loader: Any, replacement: SamplerWrapper) -> None:
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(loader)[name] = replacement
