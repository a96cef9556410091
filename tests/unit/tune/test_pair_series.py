"""Gains from pairs of runs."""

from __future__ import annotations

import math

import pytest

from nfold.core.stats import Interval
from nfold.tune.runs.pair_series import (
    MIN_NOISE,
    NoisePool,
    Pair,
    PairSeries,
    is_gain,
    t_quantile,
)


def series(*pairs: tuple[str, str, float]) -> PairSeries:
    """Return pairs of (old, new, gain)."""
    return PairSeries([Pair(old, new, 10.0, 10.0 / g, math.log(g)) for old, new, g in pairs])


def test_the_gain_is_the_mean_of_the_pairs() -> None:
    found = series(("old", "new", 2.0), ("old", "new", 2.42), ("new", "old", 1 / 2.2))
    gain = found.gain("old", "new", found.noise())
    assert gain is not None
    assert gain.value == pytest.approx(2.2)
    back = found.gain("new", "old", found.noise())
    assert back is not None
    assert back.value == pytest.approx(1 / 2.2)


def test_settings_that_no_pairs_connect_have_no_gain() -> None:
    assert PairSeries().gain("old", "new", NoisePool()) is None
    found = series(("old", "new", 1.1), ("one", "other", 1.1), ("old", "old", 1.0))
    for old, new in (("old", "other"), ("old", "unknown"), ("unknown", "new")):
        assert found.gain(old, new, found.noise()) is None


def test_settings_are_compared_over_those_between_them() -> None:
    found = series(("original", "first", 1.1), ("first", "second", 1.2), ("first", "third", 0.5))
    pool = NoisePool(squares=0.01, degrees_of_freedom=10)
    gain = found.gain("original", "second", pool)
    assert gain is not None
    assert gain.low is not None
    assert gain.value == pytest.approx(1.1 * 1.2)
    # Two pairs, each with the noise of the pool.
    half = t_quantile(10) * (0.01 / 10 * 2) ** 0.5
    assert math.log(gain.value / gain.low) == pytest.approx(half)


def test_noise_comes_from_equal_pairs_and_from_the_original_against_itself() -> None:
    found = series(("a", "a", 1.05), ("a", "b", 2.0), ("a", "b", 2.2), ("a", "c", 3.0))
    noise = found.noise()
    assert noise.degrees_of_freedom == 2
    expected = math.log(1.05) ** 2 + math.log(1.1) ** 2 / 2
    assert noise.squares == pytest.approx(expected)
    assert PairSeries().noise() == NoisePool()
    assert NoisePool().deviation == MIN_NOISE


def test_pairs_that_contradict_each_other_over_a_third_setting_are_noise() -> None:
    found = series(("a", "b", 1.1), ("b", "c", 1.1), ("a", "c", 1.0))
    assert found.noise().degrees_of_freedom == 1
    assert found.noise().deviation == pytest.approx(2 * math.log(1.1) / 3**0.5)


def test_more_pairs_narrow_the_interval() -> None:
    pairs = [("old", "new", 1.10), ("old", "new", 1.12)]
    widths = []
    for found in (series(*pairs), series(*pairs, *pairs, *pairs)):
        gain = found.gain("old", "new", found.noise())
        assert gain is not None
        assert gain.low is not None
        widths.append(gain.value - gain.low)
    assert widths[1] < widths[0]


def test_the_time_of_a_step_is_the_median_of_the_runs() -> None:
    found = series(("old", "new", 2.0), ("old", "new", 4.0), ("new", "other", 1.0))
    assert found.step_ms("old", 3) == 30.0
    assert found.step_ms("new", 1) == 5.0
    assert found.step_ms("unknown", 1) is None


def test_a_gain_among_many_needs_a_wider_interval() -> None:
    assert is_gain(Interval(1.10, 1.05, 1.15), 1.01)
    assert not is_gain(Interval(1.10, 1.03, 1.17), 1.01)


def test_quantiles_fall_towards_the_normal_ones() -> None:
    found = [t_quantile(count) for count in (0, 1, 5, 10, 11, 1000)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(1.96, abs=0.01)
