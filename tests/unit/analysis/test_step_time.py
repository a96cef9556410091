"""The time of a step, against numbers computed by hand."""

from __future__ import annotations

import dataclasses

import pytest

from nfold.analysis.step_time import step_time, window_step_times
from nfold.core.measurement import Window
from timed import rank, timed


def test_the_slowest_rank_of_a_window_counts() -> None:
    measured = timed([1.0, 2.0, 1.0], [2.0, 1.0, 3.0], batch=20)
    assert window_step_times(measured) == [(200.0, 10), (200.0, 10), (300.0, 10)]
    assert step_time(measured) == 200.0


def test_a_smaller_last_batch_counts_by_its_samples_or_not_at_all() -> None:
    usual = Window(start_s=0.0, seconds=1.0, steps=10, samples=100)
    smaller = dataclasses.replace(usual, start_s=1.0, seconds=0.8, samples=80, first_step=20)
    few = dataclasses.replace(usual, start_s=2.0, seconds=0.5, samples=10, first_step=40)
    one = dataclasses.replace(rank(0), windows=(usual, smaller, few))
    found = window_step_times(timed(batch=10, ranks=(one,)))
    assert [steps for _, steps in found] == [10, 10]
    assert [ms for ms, _ in found] == pytest.approx([100.0, 100.0])


def test_a_short_window_belongs_to_the_window_before_it() -> None:
    usual = Window(start_s=0.0, seconds=1.0, steps=10, samples=100, first_step=0)
    last = Window(start_s=1.0, seconds=0.8, steps=2, samples=20, first_step=10)
    one = dataclasses.replace(rank(0), windows=(usual, last))
    ((ms, steps),) = window_step_times(timed(batch=10, ranks=(one,)))
    assert ms == pytest.approx(150.0)
    assert steps == 12


def test_nothing_timed_has_no_time() -> None:
    assert step_time(timed()) is None


def test_windows_count_by_their_steps_if_a_batch_feeds_several() -> None:
    """Three steps for a batch of 10; some windows end within them."""
    parts = [(15, 50), (8, 20), (1, 10), (15, 50), (1, 0), (14, 50)]
    first, windows = 0, []
    for steps, samples in parts:
        made = {"seconds": steps / 100, "steps": steps, "samples": samples, "first_step": first}
        windows.append(Window(start_s=0.0, **made))  # type: ignore[arg-type]
        first += steps + 50  # another slot lies between
    one = dataclasses.replace(rank(0), windows=tuple(windows))
    found = window_step_times(timed(batch=10, ranks=(one,)))
    assert [ms for ms, _ in found] == pytest.approx([30.0] * len(parts))
