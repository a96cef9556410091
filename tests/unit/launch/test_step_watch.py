"""What is recorded of the steps of a watched run, and what is said about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nfold.launch.step_watch import (
    FIRST_STEPS,
    MAX_WINDOWS,
    WINDOW_S,
    StepRecorder,
    StepWindow,
    WatchedSteps,
)
from nfold.launch.watch_report import describe_watched_steps, read_watched_steps


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def record(
    file: Path, steps: int, *, step_s: float = 0.5, input_s: float = 0.0, pause_after: int = -1
) -> WatchedSteps:
    """Return what a rank records in steps of equal length, the first ones three times as long."""
    clock = Clock()
    recorder = StepRecorder(file / "watch-0.json", 0, clock)
    for step in range(steps):
        recorder.add_input(input_s)
        recorder.add_exchange(0.1)
        clock.now += step_s if step >= FIRST_STEPS else 3 * step_s
        recorder.end_step()
        if step == pause_after:
            clock.now += 60.0
    recorder.write()
    (seen,) = read_watched_steps(file)
    return seen


def test_sums_of_steps_are_those_after_the_first(tmp_path: Path) -> None:
    total = record(tmp_path, FIRST_STEPS + 30, input_s=0.2).total
    assert total.steps == 30
    assert total.seconds == pytest.approx(15.0)
    assert total.input_s == pytest.approx(6.0)
    assert total.exchange_s == pytest.approx(3.0)


def test_a_pause_is_no_step(tmp_path: Path) -> None:
    seen = record(tmp_path, FIRST_STEPS + 30, pause_after=FIRST_STEPS + 9)
    assert seen.pauses == (60.5,)
    assert seen.total.seconds / seen.total.steps == pytest.approx(0.5)


def test_a_long_run_has_a_bounded_number_of_windows(tmp_path: Path) -> None:
    seen = record(tmp_path, FIRST_STEPS + 4 * MAX_WINDOWS, step_s=WINDOW_S)
    assert MAX_WINDOWS / 2 <= len(seen.windows) <= MAX_WINDOWS
    assert seen.total.steps == 4 * MAX_WINDOWS


def test_a_run_without_timed_steps_says_so(tmp_path: Path) -> None:
    clock = Clock()
    StepRecorder(tmp_path / "watch-0.json", 0, clock).write()
    assert read_watched_steps(tmp_path) == []
    (line,) = describe_watched_steps([])
    assert "more than 10 optimizer steps" in line


def rank(
    number: int, *, exchange_s: float, input_s: float = 0.0, slower: float = 1.0
) -> WatchedSteps:
    """Two thousand steps of 10 ms, the second half ``slower`` times as long."""
    windows = [
        StepWindow(100, factor * 1.0, input_s / 20, exchange_s / 20)
        for factor in [1.0] * 10 + [slower] * 10
    ]
    return WatchedSteps(number, tuple(windows))


def test_the_rank_that_others_wait_for_is_named() -> None:
    ranks = [rank(0, exchange_s=6.0), rank(1, exchange_s=2.0, input_s=8.0)]
    first, parts = describe_watched_steps(ranks)
    assert (
        first == "2,000 steps of 10 ms; the slowest is rank 1: others wait up to 2 ms a step for it"
    )
    assert parts == (
        "a step of rank 1: waiting for batches 4 ms (40%), gradient exchange 1 ms (10%), "
        "computation and the rest 5 ms (50%)"
    )


def test_equal_ranks_have_no_slowest() -> None:
    first, _ = describe_watched_steps([rank(0, exchange_s=2.0), rank(1, exchange_s=2.1)])
    assert "slowest" not in first


def test_a_change_in_the_course_of_the_run_is_reported() -> None:
    lines = describe_watched_steps([rank(0, exchange_s=0.0, slower=1.5)])
    assert "steps changed in the course of the run: 10 → 15 ms" in lines


@pytest.mark.parametrize(
    ("explained_ms", "text"),
    [(10.2, "the run is as explained"), (8.0, "25% slower"), (20.0, "50% faster")],
)
def test_the_run_is_compared_with_its_explanation(explained_ms: float, text: str) -> None:
    assert text in describe_watched_steps([rank(0, exchange_s=0.0)], explained_ms)[-1]
