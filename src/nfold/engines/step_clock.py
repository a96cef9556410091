"""Time windows and the calls in them; devices have clocks of their own."""

from __future__ import annotations

import itertools
import time
from typing import Protocol


class StepClock(Protocol):
    def start(self) -> float:
        """Synchronize the devices and begin a window; return host monotonic seconds."""

    def mark(self) -> None:
        """Mark the end of a call of one or more steps. Never synchronizes."""

    def stop(self) -> tuple[float, list[float]]:
        """Synchronize the devices; return the window's seconds, and milliseconds of each call."""

    @property
    def ahead_s(self) -> float | None:
        """Seconds from the last mark to the end of the window on the devices; None if unknown."""


class HostClock:
    """For CPU devices, where an operation is done when its call returns."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def start(self) -> float:
        self._marks = [time.monotonic()]
        return self._marks[0]

    def mark(self) -> None:
        self._marks.append(time.monotonic())

    def stop(self) -> tuple[float, list[float]]:
        seconds = time.monotonic() - self._marks[0]
        pairs = itertools.pairwise(self._marks)
        return seconds, [1e3 * (after - before) for before, after in pairs]

    @property
    def ahead_s(self) -> float | None:
        return None
