"""Statistics against scipy and numpy as oracles, over seeded random samples."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats as oracle

from nfold.core.stats import (
    Interval,
    bootstrap,
    bootstrap_grouped,
    change_point,
    median,
    paired_ratio,
    quantile,
    ratio_of_grouped,
    weighted_median,
)

SEEDS = range(20)


def samples(seed: int, count: int, mean: float = 10.0, spread: float = 1.0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(mean, spread) for _ in range(count)]


@pytest.mark.parametrize("seed", SEEDS)
def test_median_and_quantile_agree_with_numpy(seed: int) -> None:
    draw = random.Random(seed)
    values = samples(seed, draw.randint(1, 50))
    assert median(values) == pytest.approx(float(np.median(values)))
    for q in (0.0, 0.025, 0.5, 0.975, 1.0, draw.random()):
        assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)))


@pytest.mark.parametrize("q", [-0.01, 1.01, float("nan")])
def test_quantile_refuses_invalid_arguments(q: float) -> None:
    with pytest.raises(ValueError, match="allowed are numbers from 0 to 1"):
        quantile([1.0, 2.0], q)


@pytest.mark.parametrize("seed", range(5))
def test_a_weighted_median_is_that_of_values_as_often_as_they_weigh(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, weights = rng.normal(size=6 + seed), rng.integers(1, 4, size=6 + seed)
    found = weighted_median(values.tolist(), weights.tolist())
    assert found == pytest.approx(float(np.median(np.repeat(values, weights))))


def test_no_values_have_no_quantile_and_no_median() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)
    with pytest.raises(ValueError, match="no median"):
        median([])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("statistic", "vectorised"), [(median, np.median), (max, np.max)])
def test_bootstrap_agrees_with_scipy(seed: int, statistic: object, vectorised: object) -> None:
    """Both intervals are random: they agree within a fraction of their own width."""
    assert callable(statistic)
    values = samples(seed, 30)
    mine = bootstrap(values, statistic)
    theirs = oracle.bootstrap(
        (values,), vectorised, method="percentile", n_resamples=4000, rng=np.random.default_rng(0)
    ).confidence_interval
    width = theirs.high - theirs.low
    assert mine.value == statistic(values)
    assert mine.low == pytest.approx(theirs.low, abs=0.2 * width)
    assert mine.high == pytest.approx(theirs.high, abs=0.2 * width)


def test_bootstrap_intervals_have_their_nominal_coverage() -> None:
    """Of 200 intervals of 20 samples, 95 % should hold the true median; 89 % at the least."""
    held = 0
    for seed in range(200):
        found = bootstrap(samples(seed, 20))
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 10.0 <= found.high
    assert held >= 178


def test_the_same_samples_always_give_the_same_interval() -> None:
    values = samples(1, 25)
    assert bootstrap(values) == bootstrap(list(values))


def test_one_sample_has_no_interval() -> None:
    assert bootstrap([3.0]) == Interval(3.0, None, None)
    assert bootstrap_grouped([[3.0]]) == Interval(3.0, None, None)


def test_equal_samples_have_an_interval_of_no_width() -> None:
    assert bootstrap([2.0, 2.0, 2.0]) == Interval(2.0, 2.0, 2.0)


def test_one_group_is_resampled_as_plain_samples() -> None:
    values = samples(3, 12)
    assert bootstrap_grouped([values]) == bootstrap(values)


def test_differences_between_processes_widen_the_interval() -> None:
    """Three processes at 9, 10 and 11: pooled windows hide it, groups do not."""
    groups = [samples(seed, 20, mean, 0.1) for seed, mean in enumerate((9.0, 10.0, 11.0))]
    pooled = bootstrap([value for group in groups for value in group])
    grouped = bootstrap_grouped(groups)
    assert grouped.value == pooled.value
    assert _width(grouped) > 1.5 * _width(pooled)


def _width(interval: Interval) -> float:
    assert interval.low is not None
    assert interval.high is not None
    return interval.high - interval.low


def test_three_groups_of_one_use_the_spread_between_them() -> None:
    found = bootstrap_grouped([[9.0], [10.0], [11.0]])
    assert found == Interval(10.0, 9.0, 11.0)


def test_pairs_cancel_a_drift_that_both_sides_share() -> None:
    """Both sides slow down from 100 to 60; in every pair the ratio is 2."""
    below = [[100.0 - 10 * i] for i in range(5)]
    above = [[2 * value for value in group] for group in below]
    assert ratio_of_grouped(above, below) == Interval(2.0, 2.0, 2.0)
    assert paired_ratio([v for (v,) in above], [v for (v,) in below]) == Interval(2.0, 2.0, 2.0)


def test_unequal_numbers_of_groups_are_resampled_on_their_own() -> None:
    above, below = [samples(1, 20, 20.0)], [samples(2, 20), samples(3, 20)]
    found = ratio_of_grouped(above, below)
    assert found.value == pytest.approx(2.0, rel=0.1)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ratio_of_two_groups_agrees_with_scipy(seed: int) -> None:
    above, below = samples(seed, 25, 20.0), samples(seed + 100, 25)

    def ratio(a: Sequence[float], b: Sequence[float], axis: int = -1) -> object:
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    theirs = oracle.bootstrap(
        (above, below), ratio, method="percentile", n_resamples=4000, rng=np.random.default_rng(0)
    ).confidence_interval
    mine = ratio_of_grouped([above], [below])
    width = theirs.high - theirs.low
    assert mine.value == statistics.median(above) / statistics.median(below)
    assert mine.low == pytest.approx(theirs.low, abs=0.2 * width)
    assert mine.high == pytest.approx(theirs.high, abs=0.2 * width)


def test_a_ratio_of_single_samples_has_no_interval() -> None:
    assert ratio_of_grouped([[4.0]], [[2.0, 2.0]]) == Interval(2.0)
    assert paired_ratio([4.0], [2.0]) == Interval(2.0)


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_change_point_is_the_split_with_the_largest_mann_whitney_u(seed: int) -> None:
    """Rounded samples have ties; Pettitt's U is 2 U₁ - n₁ n₂ in Mann and Whitney's terms."""
    draw = random.Random(seed)
    jump = draw.randint(10, 20)
    values = [round(v, 1) for v in samples(seed, jump) + samples(seed + 50, 30 - jump, 13.0)]
    found = change_point(values)
    assert found is not None
    u = {k: abs(_pettitt_u(values, k)) for k in range(1, len(values))}
    assert u[found.index] == max(u.values())
    assert found.before == median(values[: found.index])
    assert found.after == median(values[found.index :])
    n = len(values)
    assert found.p == pytest.approx(2 * np.exp(-6 * max(u.values()) ** 2 / (n**3 + n**2)))


def _pettitt_u(values: Sequence[float], split: int) -> float:
    one, other = values[:split], values[split:]
    u = oracle.mannwhitneyu(one, other).statistic
    return float(2 * u - len(one) * len(other))


def test_noise_without_a_jump_is_rarely_called_one() -> None:
    """Pettitt's approximation is conservative: at p < 0.01, at most 1 % of healthy series."""
    assert sum(change_point(samples(seed, 30)) is not None for seed in range(300)) <= 3


def test_a_jump_back_is_found_in_either_direction() -> None:
    up, down = [1.0] * 10 + [2.0] * 10, [2.0] * 10 + [1.0] * 10
    for values in (up, down):
        found = change_point(values)
        assert found is not None
        assert (found.index, found.before, found.after) == (10, values[0], values[-1])


@pytest.mark.parametrize("values", [[], [1.0] * 7, [1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0]])
def test_fewer_than_eight_values_never_show_a_jump(values: list[float]) -> None:
    assert change_point(values) is None


def test_equal_values_show_no_jump() -> None:
    assert change_point([1.0] * 100) is None
