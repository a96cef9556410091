"""One pass over a script's DataLoader; the loader itself remembers it, and where it was made."""

from __future__ import annotations

import dis
import inspect
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import OneCycleLR

from nfold.core.errors import Unsupported
from nfold.core.source_location import find_user_frame

INDICES_ATTRIBUTE = "_nfold_indices"
"""Where an iterator of a DataLoader keeps the indices that it has drawn and not yet given."""
PASS_ATTRIBUTE, CREATION_LINES_ATTRIBUTE, CYCLED_ATTRIBUTE = (
    "_nfold_pass",
    "_nfold_lines",
    "_nfold_around",
)
"""Where a DataLoader keeps its last pass, the lines of the user's code that made it, the one that
did and those that had called for it, and whether a generator goes through it again and again.

Nothing else holds on to them: what a script is through with may go, with its workers.
"""

IteratorFactory = Callable[[], Iterator[Any]]


@dataclass
class EpochPass:
    """How far a pass has come, after so many steps of the training."""

    batches: int = 0
    steps_before: int = 0
    is_over: bool = False


class BatchProvider(Protocol):
    """Whose batches a stream gives."""

    def next_batch(self, iterator: InstrumentedIterator) -> Any:
        """The next batch; StopIteration at the end."""

    def on_batch(self, iterator: InstrumentedIterator, batch: Any, wait_s: float) -> None:
        """A batch was given."""

    def on_pass_end(self, loader: Any, epoch_pass: EpochPass) -> None:
        """There are no more."""


class InstrumentedIterator:
    """One pass over a DataLoader. What it has not itself is its real iterator's.

    ``begin`` makes that.
    """

    def __init__(
        self, loader: Any, make_iterator: IteratorFactory, provider: BatchProvider
    ) -> None:
        self.loader = loader
        self.source: Iterator[Any] = iter(())
        self.make_iterator = make_iterator
        self.is_started = False
        self.first_batch: Any = None
        if is_first_pass(loader):
            frame, _ = find_user_frame(sys._getframe(1))
            vars(loader)[CYCLED_ATTRIBUTE] = frame is not None and is_cycling_generator(frame)
        self.epoch_pass = vars(loader)[PASS_ATTRIBUTE] = EpochPass()
        self._provider = provider

    def __iter__(self) -> InstrumentedIterator:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            batch = self._provider.next_batch(self)
        except StopIteration:
            self._provider.on_pass_end(self.loader, self.epoch_pass)
            raise
        self.epoch_pass.batches += 1
        self._provider.on_batch(self, batch, time.perf_counter() - began)
        return batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    def take_indices(self) -> Any:
        """Those of the batch that was given last, None where the data set has none."""
        drawn = getattr(self.source, INDICES_ATTRIBUTE, None)
        return drawn.popleft() if drawn else None


def is_first_pass(loader: Any) -> bool:
    """Whether nobody has iterated over it before."""
    return PASS_ATTRIBUTE not in vars(loader)


def is_cycling_generator(frame: FrameType) -> bool:
    """Whether it is a generator's that begins anew with what it goes through now.

    Who asks it for batches counts steps, and not passes over the data.
    """
    code, here = frame.f_code, frame.f_lasti
    if not code.co_flags & inspect.CO_GENERATOR:
        return False
    later = (one for one in dis.get_instructions(code) if one.offset > here)
    return any("BACKWARD" in one.opname and one.argval <= here for one in later)


def is_cycled(loader: Any) -> bool:
    """Whether such a one goes through the loader."""
    return bool(vars(loader).get(CYCLED_ATTRIBUTE))


def same_creation_line(loader: Any, other: Any) -> bool:
    """Whether one line of the user's code made both."""
    lines, theirs = (
        vars(loader).get(CREATION_LINES_ATTRIBUTE),
        vars(other).get(CREATION_LINES_ATTRIBUTE),
    )
    return bool(lines and theirs) and lines[0] == theirs[0]


def same_dataset(loader: Any, other: Any) -> bool:
    """Whether both give the samples of one data set, or of two that the same calls made alike.

    A line that makes loaders for whoever calls it makes a validation's as well.
    """
    data, theirs = loader.dataset, other.dataset
    if data is theirs:
        return True
    lines = vars(loader).get(CREATION_LINES_ATTRIBUTE)
    alike = type(data) is type(theirs) and length_or_none(data) == length_or_none(theirs)
    drawn_alike = type(script_sampler(loader.sampler)) is type(script_sampler(other.sampler))
    return (
        lines is not None
        and lines == vars(other).get(CREATION_LINES_ATTRIBUTE)
        and alike
        and drawn_alike
    )


def wrap_next_index(usual: Any) -> Any:
    """Drawing the indices of a batch, which are kept until it is given."""

    def next_index(iterator: Any) -> Any:
        drawn = usual(iterator)
        vars(iterator).setdefault(INDICES_ATTRIBUTE, deque()).append(drawn)
        return drawn

    return next_index


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
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _set_index_source(loader: Any, replacement: SamplerWrapper) -> None:
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(loader)[name] = replacement


class CompanionLoaders:
    """Those that gave in two steps on end of a warm-up, and what stands in their places later.

    A semi-supervised training has one of labelled and one of other samples; that of fewer batches
    is begun again whenever it ends, in the middle of an epoch.
    """

    def __init__(self) -> None:
        self._loaders: dict[int, Any] = {}
        self._current_step: dict[int, Any] = {}
        self._previous_step: dict[int, Any] = {}

    def __contains__(self, loader: Any) -> bool:
        return id(loader) in self._loaders

    @property
    def all(self) -> tuple[Any, ...]:
        """In the order in which they were found."""
        return tuple(self._loaders.values())

    def record_batch(self, loader: Any) -> None:
        """It gave a batch: to train on, where gradients are computed."""
        if torch.is_grad_enabled():
            self._current_step[id(loader)] = loader

    def on_step(self, epoch_loaders: Any) -> None:
        """A step of the warm-up was made; ``counted`` are known to feed it by themselves."""
        again = {key: one for key, one in self._current_step.items() if key in self._previous_step}
        self._loaders |= again
        for key in epoch_loaders:
            self._loaders.pop(key, None)
        self._previous_step, self._current_step = self._current_step, {}

    def end_warm_up(self) -> None:
        """The warm-up is over: nobody else is one of them."""
        self._current_step, self._previous_step = {}, {}

    def replace(self, loader: Any, replacement: Any) -> None:
        """``other`` stands beside from now on, and ``loader`` no more."""
        del self._loaders[id(loader)]
        self._loaders[id(replacement)] = replacement

    def replace_predecessor(self, loader: Any) -> Any:
        """Stand in the place of one that the same line has made, which is returned, or None."""
        for old in self.all:
            if same_creation_line(old, loader) and same_dataset(old, loader):
                self.replace(old, loader)
                return old
        return None
