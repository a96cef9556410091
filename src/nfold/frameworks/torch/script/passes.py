"""One pass over a script's DataLoader; the loader itself remembers it, and where it was made."""

from __future__ import annotations

import dis
import inspect
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from nfold.frameworks.torch.script.ends import length_or_none, script_sampler
from nfold.place import find_user_frame

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
