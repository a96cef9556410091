"""Calls of steps from one fence to the next, and the windows that they are cut into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from nfold.measurement import Between, Fetches, Window

Loss = TypeVar("Loss")


@dataclass(frozen=True)
class Call(Generic[Loss]):
    """One call of ``steps`` steps with ``count`` samples each, whose losses are not yet read."""

    loss: Loss
    steps: int
    count: int


@dataclass(frozen=True)
class _Cut:
    """The end of a window: its ``calls``, counted from the last fence, and what was known then."""

    calls: int
    turn: int | None
    kept: bool
    fetches: Fetches | None


@dataclass(frozen=True)
class Timed:
    """A window, whether it counts, whose turn it was, and what its steps took."""

    window: Window
    kept: bool
    turn: int | None
    step_ms: tuple[float, ...]


class Stretch(Generic[Loss]):
    """``add`` every call, ``cut`` where a window ends, and read the ``timed`` after the fence."""

    def __init__(self) -> None:
        self.calls: list[Call[Loss]] = []
        self._cuts: list[_Cut] = []
        self.open_steps = 0
        """Those in no window that has ended."""

    @property
    def steps(self) -> int:
        """Since the last fence."""
        return sum(call.steps for call in self.calls)

    def add(self, call: Call[Loss]) -> None:
        """One more."""
        self.calls.append(call)
        self.open_steps += call.steps

    def cut(self, turn: int | None, *, kept: bool, fetches: Fetches | None) -> None:
        """A window ends here, if it has a step."""
        if self.open_steps:
            self._cuts.append(_Cut(len(self.calls), turn, kept, fetches))
            self.open_steps = 0

    def timed(
        self,
        made: int,
        start_s: float,
        seconds: float,
        call_ms: Sequence[float],
        between: Between | None,
        ahead_s: float | None,
    ) -> Iterator[Timed]:
        """The windows, which took so long together; ``made`` steps were before them.

        ``between`` lies before the first, and devices were ``ahead_s`` behind after the last.
        """
        first, end_s = 0, start_s + seconds
        for cut in self._cuts:
            calls, their_ms = self.calls[first : cut.calls], call_ms[first : cut.calls]
            last = cut is self._cuts[-1]
            window = Window(
                start_s=start_s,
                seconds=end_s - start_s if last else sum(their_ms) / 1e3,
                steps=sum(call.steps for call in calls),
                samples=sum(call.steps * call.count for call in calls),
                first=made,
                fetches=cut.fetches,
                between=None if first else between,
                ahead_s=ahead_s if last else None,
            )
            pairs = zip(their_ms, calls, strict=True)
            step_ms = tuple(ms / call.steps for ms, call in pairs for _ in range(call.steps))
            yield Timed(window, cut.kept, cut.turn, step_ms)
            first, made = cut.calls, made + window.steps
            start_s += window.seconds

    def clear(self) -> None:
        """A fence: what comes is another stretch."""
        self.calls.clear()
        self._cuts.clear()
        self.open_steps = 0
