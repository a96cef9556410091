"""Timing with a clock that the test turns."""

from __future__ import annotations

import pytest

from nfold.workloads.conv2d.process import MIN_CALLS, CallTimer, TimedCall, window_sizes


class Scene:
    """A clock that advances by what calls cost, and a record of beats and barriers."""

    def __init__(self, steps: int, warmup: int = 2) -> None:
        self.now = 100.0
        self.beats: list[tuple[int, int]] = []
        self.log: list[str] = []
        self.sampler = CallTimer(
            images=10,
            rank_images=4,
            warmup=warmup,
            steps=steps,
            clock=lambda: self.now,
            barrier=lambda: self.log.append("barrier"),
            beat=lambda done, total: self.beats.append((done, total)),
        )

    def probe(self, seconds: float, *, windowed: bool = False) -> TimedCall:
        def call() -> float:
            self.now += seconds
            self.log.append("call")
            return seconds

        return TimedCall(name="p", call=call, bytes=80, note="n", is_throughput=windowed)


def test_a_part_has_its_raw_seconds_and_what_it_moves() -> None:
    scene = Scene(steps=5)
    (part,), windows = scene.sampler.run([scene.probe(0.25)])
    assert part.seconds == (0.25,) * 5
    assert (part.name, part.images, part.bytes, part.note) == ("p", 10, 80, "n")
    assert windows == ()
    assert scene.log == ["call"] * 2 + ["barrier"] + ["call"] * 5


def test_windows_hold_every_call_and_begin_after_a_barrier() -> None:
    scene = Scene(steps=25, warmup=0)
    (part,), windows = scene.sampler.run([scene.probe(0.5, windowed=True)])
    assert len(part.seconds) == 25
    assert sum(window.steps for window in windows) == 25
    assert [window.seconds for window in windows] == [0.5 * window.steps for window in windows]
    assert [window.samples for window in windows] == [4 * window.steps for window in windows]
    assert windows[0].start_s == 100.0
    assert scene.log.count("barrier") == 1 + len(windows)


def test_beats_never_exceed_what_is_planned_and_end_there() -> None:
    scene = Scene(steps=3)
    scene.sampler.run([scene.probe(0.1), scene.probe(0.1)])
    assert scene.beats[0] == (1, 6)
    assert scene.beats[-1] == (6, 6)
    assert max(done for done, _ in scene.beats[:5]) <= 3


def test_a_slow_part_stops_early_but_not_the_windows() -> None:
    scene = Scene(steps=30)
    slow = [scene.probe(4.0), scene.probe(4.0, windowed=True)]
    (limited, full), _ = scene.sampler.run(slow)
    assert len(limited.seconds) == MIN_CALLS
    assert len(full.seconds) == 30


@pytest.mark.parametrize(("steps", "sizes"), [(1, [1]), (3, [1] * 3), (30, [3] * 10)])
def test_window_sizes(steps: int, sizes: list[int]) -> None:
    assert window_sizes(steps) == sizes


def test_uneven_windows_differ_by_one() -> None:
    sizes = window_sizes(25)
    assert len(sizes) == 10
    assert sum(sizes) == 25
    assert set(sizes) == {2, 3}
