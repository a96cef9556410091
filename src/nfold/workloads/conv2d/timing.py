"""How calls are timed: probes, repeated calls, windows. Pure Python, any clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nfold.core.measurement import OperationPart, Window

Clock = Callable[[], float]

MAX_WINDOWS = 10
WARMUP_LIMIT_S = 2.0
PART_LIMIT_S = 5.0  # A part that is not windowed stops after this time once it has LEAST calls
MIN_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class TimedCall:
    """Something to time: ``call`` does it once, to its end, and returns its seconds.

    ``bytes`` is what one call moves at least over all ranks. A ``windowed`` probe is the
    measurement's throughput: it always makes all its calls, in windows that begin together on
    every rank.
    """

    name: str
    call: Callable[[], float]
    bytes: int
    note: str = ""
    is_throughput: bool = False


@dataclass(frozen=True, kw_only=True)
class CallTimer:
    """Times probes one after the other: warm-up, then ``steps`` calls of each.

    ``images`` is what one call handles over all ranks, ``own_images`` what this rank does of
    it. ``clock`` is the host's monotonic clock in seconds; ``barrier`` waits for all ranks;
    ``beat`` takes (calls done, calls planned).
    """

    images: int
    rank_images: int
    warmup: int
    steps: int
    clock: Clock
    barrier: Callable[[], None]
    beat: Callable[[int, int], None]

    def run(
        self, probes: Sequence[TimedCall]
    ) -> tuple[tuple[OperationPart, ...], tuple[Window, ...]]:
        """One part per probe, and the windows of the windowed one."""
        parts: list[OperationPart] = []
        windows: list[Window] = []
        total = self.steps * len(probes)
        for place, probe in enumerate(probes):
            calls = self._calls(probe, place * self.steps, total)
            self._warm_up(calls)
            self.barrier()
            seconds = (
                self._windows(calls, windows) if probe.is_throughput else self._timed_part(calls)
            )
            parts.append(self._to_part(probe, seconds))
        return tuple(parts), tuple(windows)

    def beat_finished(self, probes: int) -> None:
        """A sign of life after all calls of so many probes."""
        self.beat(self.steps * probes, self.steps * probes)

    def _calls(self, probe: TimedCall, before: int, total: int) -> Iterator[float]:
        done = 0
        while True:
            seconds = probe.call()
            done += 1
            self.beat(before + min(done, self.steps), total)
            yield seconds

    def _warm_up(self, calls: Iterator[float]) -> None:
        began = self.clock()
        for _ in range(self.warmup):
            next(calls)
            if self.clock() - began > WARMUP_LIMIT_S:
                return

    def _timed_part(self, calls: Iterator[float]) -> list[float]:
        began = self.clock()
        seconds: list[float] = []
        while len(seconds) < self.steps:
            seconds.append(next(calls))
            if len(seconds) >= MIN_CALLS and self.clock() - began > PART_LIMIT_S:
                break
        return seconds

    def _windows(self, calls: Iterator[float], windows: list[Window]) -> list[float]:
        seconds: list[float] = []
        for steps in window_sizes(self.steps):
            self.barrier()
            start = self.clock()
            seconds.extend(next(calls) for _ in range(steps))
            window = Window(
                start_s=start,
                seconds=self.clock() - start,
                steps=steps,
                samples=steps * self.rank_images,
            )
            windows.append(window)
        return seconds

    def _to_part(self, probe: TimedCall, seconds: Sequence[float]) -> OperationPart:
        return OperationPart(
            name=probe.name,
            seconds=tuple(seconds),
            images=self.images,
            bytes=probe.bytes,
            note=probe.note,
        )


def window_sizes(steps: int) -> list[int]:
    """The calls of each of up to WINDOWS windows; sizes differ by one at most."""
    count = min(MAX_WINDOWS, steps)
    return [(k + 1) * steps // count - k * steps // count for k in range(count)]
