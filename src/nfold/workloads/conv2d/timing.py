"""Timing of repeated calls: warm-up, calls, windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nfold.core.measurement import OperationPart, Window

Clock = Callable[[], float]

MAX_WINDOWS = 10
WARMUP_LIMIT_S = 2.0
PART_LIMIT_S = 5.0  # after MIN_CALLS calls; not for the throughput
MIN_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class TimedCall:
    """A timed call; ``call`` returns its seconds.

    ``bytes`` is the minimum that one call moves on all ranks. With ``is_throughput`` all calls are
    made, in windows that begin at the same time on every rank.
    """

    name: str
    call: Callable[[], float]
    bytes: int
    note: str = ""
    is_throughput: bool = False


@dataclass(frozen=True, kw_only=True)
class CallTimer:
    """Times calls one after the other: warm-up, then ``steps`` repetitions of each.

    ``images`` are the images per call on all ranks, ``rank_images`` on this rank. ``clock`` is the
    host's monotonic clock in seconds; ``barrier`` waits for all ranks; ``beat`` takes (calls done,
    calls planned).
    """

    images: int
    rank_images: int
    warmup: int
    steps: int
    clock: Clock
    barrier: Callable[[], None]
    beat: Callable[[int, int], None]

    def run(
        self, timed_calls: Sequence[TimedCall]
    ) -> tuple[tuple[OperationPart, ...], tuple[Window, ...]]:
        """Return one part per timed call, and the windows of the throughput."""
        parts: list[OperationPart] = []
        windows: list[Window] = []
        total = self.steps * len(timed_calls)
        for index, timed_call in enumerate(timed_calls):
            calls = self._calls(timed_call, index * self.steps, total)
            self._warm_up(calls)
            self.barrier()
            throughput = timed_call.is_throughput
            seconds = self._windows(calls, windows) if throughput else self._timed_part(calls)
            parts.append(
                OperationPart(
                    name=timed_call.name,
                    seconds=tuple(seconds),
                    images=self.images,
                    bytes=timed_call.bytes,
                    note=timed_call.note,
                )
            )
        return tuple(parts), tuple(windows)

    def _calls(self, timed_call: TimedCall, before: int, total: int) -> Iterator[float]:
        done = 0
        while True:
            seconds = timed_call.call()
            done += 1
            self.beat(before + min(done, self.steps), total)
            yield seconds

    def _warm_up(self, calls: Iterator[float]) -> None:
        start = self.clock()
        for _ in range(self.warmup):
            next(calls)
            if self.clock() - start > WARMUP_LIMIT_S:
                return

    def _timed_part(self, calls: Iterator[float]) -> list[float]:
        start = self.clock()
        seconds: list[float] = []
        while len(seconds) < self.steps:
            seconds.append(next(calls))
            if len(seconds) >= MIN_CALLS and self.clock() - start > PART_LIMIT_S:
                break
        return seconds

    def _windows(self, calls: Iterator[float], windows: list[Window]) -> list[float]:
        seconds: list[float] = []
        for steps in window_sizes(self.steps):
            self.barrier()
            start = self.clock()
            seconds.extend(next(calls) for _ in range(steps))
            duration, samples = self.clock() - start, steps * self.rank_images
            windows.append(Window(start_s=start, seconds=duration, steps=steps, samples=samples))
        return seconds


def window_sizes(steps: int) -> list[int]:
    """Return the number of calls of each of at most MAX_WINDOWS windows."""
    count = min(MAX_WINDOWS, steps)
    return [(k + 1) * steps // count - k * steps // count for k in range(count)]
