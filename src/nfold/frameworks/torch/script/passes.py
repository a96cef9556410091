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

from nfold.frameworks.torch.script.ends import length_of, own
from nfold.place import users_frame

INDICES = "_nfold_indices"
"""Where an iterator of a DataLoader keeps the indices that it has drawn and not yet given."""
LATEST, MADE_AT, AROUND = "_nfold_pass", "_nfold_lines", "_nfold_around"
"""Where a DataLoader keeps its last pass, the lines of the user's code that made it, the one that
did and those that had called for it, and whether a generator goes through it again and again.

Nothing else holds on to them: what a script is through with may go, with its workers.
"""

Begin = Callable[[], Iterator[Any]]


@dataclass
class Pass:
    """How far a pass has come, after so many steps of the training."""

    given: int = 0
    steps_before: int = 0
    over: bool = False


class Giver(Protocol):
    """Whose batches a stream gives."""

    def next_of(self, stream: Stream) -> Any:
        """The next batch; StopIteration at the end."""

    def gave(self, stream: Stream, batch: Any, wait_s: float) -> None:
        """A batch was given."""

    def ended(self, loader: Any, made: Pass) -> None:
        """There are no more."""


class Stream:
    """One pass over a DataLoader. What it has not itself is its real iterator's.

    ``begin`` makes that.
    """

    def __init__(self, loader: Any, begin: Begin, feed: Giver) -> None:
        self.loader = loader
        self.source: Iterator[Any] = iter(())
        self.begin = begin
        self.begun = False
        self.first: Any = None
        if first_time(loader):
            frame, _ = users_frame(sys._getframe(1))
            vars(loader)[AROUND] = frame is not None and goes_around(frame)
        self.made = vars(loader)[LATEST] = Pass()
        self._feed = feed

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            batch = self._feed.next_of(self)
        except StopIteration:
            self._feed.ended(self.loader, self.made)
            raise
        self.made.given += 1
        self._feed.gave(self, batch, time.perf_counter() - began)
        return batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    def indices(self) -> Any:
        """Those of the batch that was given last, None where the data set has none."""
        drawn = getattr(self.source, INDICES, None)
        return drawn.popleft() if drawn else None


def first_time(loader: Any) -> bool:
    """Whether nobody has iterated over it before."""
    return LATEST not in vars(loader)


def goes_around(frame: FrameType) -> bool:
    """Whether it is a generator's that begins anew with what it goes through now.

    Who asks it for batches counts steps, and not passes over the data.
    """
    code, here = frame.f_code, frame.f_lasti
    if not code.co_flags & inspect.CO_GENERATOR:
        return False
    later = (one for one in dis.get_instructions(code) if one.offset > here)
    return any("BACKWARD" in one.opname and one.argval <= here for one in later)


def around(loader: Any) -> bool:
    """Whether such a one goes through the loader."""
    return bool(vars(loader).get(AROUND))


def same_place(loader: Any, other: Any) -> bool:
    """Whether one line of the user's code made both."""
    lines, theirs = vars(loader).get(MADE_AT), vars(other).get(MADE_AT)
    return bool(lines and theirs) and lines[0] == theirs[0]


def same_data(loader: Any, other: Any) -> bool:
    """Whether both give the samples of one data set, or of two that the same calls made alike.

    A line that makes loaders for whoever calls it makes a validation's as well.
    """
    data, theirs = loader.dataset, other.dataset
    if data is theirs:
        return True
    lines = vars(loader).get(MADE_AT)
    alike = type(data) is type(theirs) and length_of(data) == length_of(theirs)
    drawn_alike = type(own(loader.sampler)) is type(own(other.sampler))
    return lines is not None and lines == vars(other).get(MADE_AT) and alike and drawn_alike


def keeping(usual: Any) -> Any:
    """Drawing the indices of a batch, which are kept until it is given."""

    def next_index(iterator: Any) -> Any:
        drawn = usual(iterator)
        vars(iterator).setdefault(INDICES, deque()).append(drawn)
        return drawn

    return next_index
