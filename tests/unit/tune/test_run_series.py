"""Gains from runs that alternate."""

from __future__ import annotations

import math

import pytest

from nfold.core.stats import Interval
from nfold.tune.runs.run_series import MIN_NOISE, NoisePool, RunSeries, is_gain, t_quantile


def series(*runs: tuple[str, float]) -> RunSeries:
    found = RunSeries()
    for what, time in runs:
        found.add(what, time)
    return found


def test_a_run_is_compared_with_the_old_runs_around_it() -> None:
    """The machine becomes slower all the time."""
    found = series(("old", 10.0), ("new", 5.5), ("old", 12.1), ("new", 6.65), ("old", 14.641))
    gain = found.gain("old", "new", found.noise())
    assert gain is not None
    assert gain.value == pytest.approx(2.0, rel=0.01)


def test_without_runs_of_both_there_is_no_gain() -> None:
    assert series(("old", 10.0)).gain("old", "new", NoisePool()) is None
    assert series(("new", 10.0)).gain("old", "new", NoisePool()) is None


def test_noise_comes_from_all_settings_that_ran_more_than_once() -> None:
    noise = series(("a", 1.0), ("b", 2.0), ("a", 1.1), ("b", 2.0), ("c", 3.0)).noise()
    assert noise.degrees_of_freedom == 2
    assert noise.deviation == pytest.approx(0.0477, rel=0.01)
    assert NoisePool().deviation == MIN_NOISE


def test_more_runs_narrow_the_interval() -> None:
    runs = [("old", 10.0), ("new", 9.0), ("old", 10.2), ("new", 9.1)]
    few, many = series(*runs), series(*runs, *runs, *runs)
    widths = []
    for found in (few, many):
        gain = found.gain("old", "new", found.noise())
        assert gain is not None
        assert gain.low is not None
        widths.append(gain.value - gain.low)
    assert widths[1] < widths[0]


def test_old_runs_that_are_far_away_do_not_narrow_the_interval() -> None:
    """Only the runs around a new one are compared with it."""
    near = [("old", 10.0), ("new", 9.0), ("old", 10.0)]
    pool = NoisePool(squares=0.01, degrees_of_freedom=10)
    few = series(*near).gain("old", "new", pool)
    many = series(*[("old", 10.0)] * 20, *near).gain("old", "new", pool)
    assert few == many
    assert few is not None
    assert few.low is not None
    # One new run, and the mean of two old ones.
    half = t_quantile(10) * (0.01 / 10 * (1 + 1 / 2)) ** 0.5
    assert math.log(few.value / few.low) == pytest.approx(half)


def test_a_gain_among_many_needs_a_wider_interval() -> None:
    assert is_gain(Interval(1.10, 1.05, 1.15), 1.01)
    assert not is_gain(Interval(1.10, 1.03, 1.17), 1.01)


def test_quantiles_fall_towards_the_normal_ones() -> None:
    found = [t_quantile(count) for count in (0, 1, 5, 10, 11, 1000)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(1.96, abs=0.01)
