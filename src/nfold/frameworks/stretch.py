"""Calls of steps from one fence to the next, and the windows that they are cut into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from nfold.measurement import EpochGap, FetchStats, Window

Loss = TypeVar("Loss")


@dataclass(frozen=True)
class CompletedCall(Generic[Loss]):
    """One call of ``steps`` steps with ``count`` samples each, whose losses are not yet read."""

    loss: Loss
    steps: int
    count: int


@dataclass(frozen=True)
class _WindowEnd:
    """The end of a window: its ``calls``, counted from the last fence, and what was known then."""

    calls: int
    variant_index: int | None
    measured: bool
    fetches: FetchStats | None


@dataclass(frozen=True)
class TimedWindow:
    """A window, whether it counts, whose turn it was, and what its steps took."""

    window: Window
    measured: bool
    variant_index: int | None
    step_ms: tuple[float, ...]


class WindowBuffer(Generic[Loss]):
    """``add`` every call, ``cut`` where a window ends, and read the ``timed`` after the fence."""

    def __init__(self) -> None:
        self.calls: list[CompletedCall[Loss]] = []
        self._window_ends: list[_WindowEnd] = []
        self.open_steps = 0
        """Those in no window that has ended."""

    @property
    def steps(self) -> int:
        """Since the last fence."""
        return sum(call.steps for call in self.calls)

    def add(self, call: CompletedCall[Loss]) -> None:
        """One more."""
        self.calls.append(call)
        self.open_steps += call.steps

    def end_window(
        self, variant_index: int | None, *, measured: bool, fetches: FetchStats | None
    ) -> None:
        """A window ends here, if it has a step."""
        if self.open_steps:
            self._window_ends.append(_WindowEnd(len(self.calls), variant_index, measured, fetches))
            self.open_steps = 0

    def timed_windows(
        self,
        first_step: int,
        start_s: float,
        seconds: float,
        call_ms: Sequence[float],
        epoch_gap: EpochGap | None,
        ahead_s: float | None,
    ) -> Iterator[TimedWindow]:
        """The windows, which took so long together; ``made`` steps were before them.

        ``between`` lies before the first, and devices were ``ahead_s`` behind after the last.
        """
        first, end_s = 0, start_s + seconds
        for cut in self._window_ends:
            calls, their_ms = self.calls[first : cut.calls], call_ms[first : cut.calls]
            last = cut is self._window_ends[-1]
            window = Window(
                start_s=start_s,
                seconds=end_s - start_s if last else sum(their_ms) / 1e3,
                steps=sum(call.steps for call in calls),
                samples=sum(call.steps * call.count for call in calls),
                first_step=first_step,
                fetches=cut.fetches,
                epoch_gap=None if first else epoch_gap,
                queue_drain_s=ahead_s if last else None,
            )
            pairs = zip(their_ms, calls, strict=True)
            step_ms = tuple(ms / call.steps for ms, call in pairs for _ in range(call.steps))
            yield TimedWindow(window, cut.measured, cut.variant_index, step_ms)
            first, first_step = cut.calls, first_step + window.steps
            start_s += window.seconds

    def clear(self) -> None:
        """A fence: what comes is another stretch."""
        self.calls.clear()
        self._window_ends.clear()
        self.open_steps = 0
