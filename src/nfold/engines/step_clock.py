"""What times windows and the steps in them; devices have clocks of their own."""

from __future__ import annotations

import itertools
import time
from typing import Protocol


class StepClock(Protocol):
    """Marks the ends of steps inside a window; reads them only after the window."""

    def start(self) -> float:
        """Fence the devices and begin a window; host monotonic seconds."""

    def mark(self) -> None:
        """The end of a call of one or more steps. Never synchronises."""

    def stop(self) -> tuple[float, list[float]]:
        """Fence the devices and end the window: its seconds, and milliseconds of each call."""

    @property
    def ahead_s(self) -> float | None:
        """Seconds that the devices went on after the last mark of the window that was stopped.

        None where nobody can tell.
        """


class HostClock:
    """For CPU devices, where an operation is done when its call returns."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def start(self) -> float:
        """Begin a window now."""
        self._marks = [time.monotonic()]
        return self._marks[0]

    def mark(self) -> None:
        """Note the time."""
        self._marks.append(time.monotonic())

    def stop(self) -> tuple[float, list[float]]:
        """The window ends with its last step."""
        seconds = time.monotonic() - self._marks[0]
        pairs = itertools.pairwise(self._marks)
        return seconds, [1e3 * (after - before) for before, after in pairs]

    @property
    def ahead_s(self) -> float | None:
        """The host is the device."""
        return None
