"""How calls are timed: probes, repeated calls, windows. Pure Python, any clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nfold.measurement import Part, Window

Clock = Callable[[], float]

WINDOWS = 10
WARM_UP_BUDGET_S = 2.0
PART_BUDGET_S = 5.0
"""A part that is not windowed stops after this time once it has LEAST calls."""
LEAST = 3


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Something to time: ``call`` does it once, to its end, and returns its seconds.

    ``bytes`` is what one call moves at least over all ranks. A ``windowed`` probe is the
    measurement's throughput: it always makes all its calls, in windows that begin together on
    every rank.
    """

    name: str
    call: Callable[[], float]
    bytes: int
    note: str = ""
    windowed: bool = False


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Times probes one after the other: warm-up, then ``steps`` calls of each.

    ``images`` is what one call handles over all ranks, ``own_images`` what this rank does of
    it. ``clock`` is the host's monotonic clock in seconds; ``barrier`` waits for all ranks;
    ``beat`` takes (calls done, calls planned).
    """

    images: int
    own_images: int
    warmup: int
    steps: int
    clock: Clock
    barrier: Callable[[], None]
    beat: Callable[[int, int], None]

    def run(self, probes: Sequence[Probe]) -> tuple[tuple[Part, ...], tuple[Window, ...]]:
        """One part per probe, and the windows of the windowed one."""
        parts: list[Part] = []
        windows: list[Window] = []
        total = self.steps * len(probes)
        for place, probe in enumerate(probes):
            calls = self._calls(probe, place * self.steps, total)
            self._warm_up(calls)
            self.barrier()
            seconds = self._windows(calls, windows) if probe.windowed else self._limited(calls)
            parts.append(self._part(probe, seconds))
        return tuple(parts), tuple(windows)

    def beat_all(self, probes: int) -> None:
        """A sign of life after all calls of so many probes."""
        self.beat(self.steps * probes, self.steps * probes)

    def _calls(self, probe: Probe, before: int, total: int) -> Iterator[float]:
        """The seconds of endless calls, with a beat after each that stays inside the plan."""
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
            if self.clock() - began > WARM_UP_BUDGET_S:
                return

    def _limited(self, calls: Iterator[float]) -> list[float]:
        began = self.clock()
        seconds: list[float] = []
        while len(seconds) < self.steps:
            seconds.append(next(calls))
            if len(seconds) >= LEAST and self.clock() - began > PART_BUDGET_S:
                break
        return seconds

    def _windows(self, calls: Iterator[float], windows: list[Window]) -> list[float]:
        """Time every window as a whole, between barriers that are outside of it."""
        seconds: list[float] = []
        for steps in window_sizes(self.steps):
            self.barrier()
            start = self.clock()
            seconds.extend(next(calls) for _ in range(steps))
            window = Window(
                start_s=start,
                seconds=self.clock() - start,
                steps=steps,
                samples=steps * self.own_images,
            )
            windows.append(window)
        return seconds

    def _part(self, probe: Probe, seconds: Sequence[float]) -> Part:
        return Part(
            name=probe.name,
            seconds=tuple(seconds),
            images=self.images,
            bytes=probe.bytes,
            note=probe.note,
        )


def window_sizes(steps: int) -> list[int]:
    """The calls of each of up to WINDOWS windows; sizes differ by one at most."""
    count = min(WINDOWS, steps)
    return [(k + 1) * steps // count - k * steps // count for k in range(count)]
