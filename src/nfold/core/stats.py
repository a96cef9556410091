"""Statistics of raw samples: pure functions of sequences of floats, standard library only.

Intervals are percentile bootstrap intervals (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 13) with a fixed seed, so that the same samples always give the same
interval. A jump in a series is found with Pettitt's test (Applied Statistics 28, 1979).
"""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

RESAMPLES = 1000
CONFIDENCE_LEVEL = 0.95
MIN_PAIRS = 3  # from here on, ratios are formed pair by pair
MAD_TO_SIGMA = 1.4826  # standard deviation over median absolute deviation of a normal distribution

Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval; the bounds are None for a single sample."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ChangePoint:
    """A jump in a series: the first index after it, the medians around it, Pettitt's p."""

    index: int
    before: float
    after: float
    p: float


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the value with half of the weight on either side, or the mean of two such values."""
    pairs = sorted(zip(values, weights, strict=True))
    cumulative = list(accumulate(weight for _, weight in pairs))
    half = cumulative[-1] / 2
    middle = (bisect.bisect_left(cumulative, half), bisect.bisect_right(cumulative, half))
    return statistics.fmean(pairs[index][0] for index in middle)


def midmean(values: Sequence[float]) -> float:
    """Return the mean of the middle half of the values.

    For two clusters of equal size it lies between them, where the median jumps.
    """
    ordered, cut = sorted(values), len(values) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def mad_deviation(values: Sequence[float]) -> float:
    """Estimate the standard deviation from the median absolute deviation.

    Robust to outliers (F. R. Hampel, The Influence Curve, JASA 69, 1974).
    """
    center = median(values)
    return MAD_TO_SIGMA * median([abs(value - center) for value in values])


def quantile(values: Sequence[float], q: float) -> float:
    """Return the ``q`` quantile (0 to 1) by linear interpolation between order statistics."""
    if not 0 <= q <= 1:
        raise ValueError(f"quantile {q}: allowed are numbers from 0 to 1")
    if not values:
        raise ValueError("quantile of no values; allowed is at least one value")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def bootstrap(values: Sequence[float], statistic: Statistic = median) -> Interval:
    """Return a statistic of independent samples with its bootstrap interval."""
    return bootstrap_grouped([values], statistic)


def bootstrap_grouped(groups: Sequence[Sequence[float]], statistic: Statistic = median) -> Interval:
    """Return a statistic of samples in groups (windows of processes) with its bootstrap interval.

    Draws groups, then samples within each drawn group, so that differences between processes
    widen the interval. The samples of a single group are drawn independently.
    """
    pooled = [value for group in groups for value in group]
    point = statistic(pooled)
    if len(pooled) < 2:
        return Interval(point)
    rng = random.Random(0)
    drawn = sorted(statistic(_resample(groups, rng)) for _ in range(RESAMPLES))
    return _percentiles(point, drawn)


def _resample(groups: Sequence[Sequence[float]], rng: random.Random) -> list[float]:
    chosen = rng.choices(groups, k=len(groups)) if len(groups) > 1 else groups
    return [value for group in chosen for value in rng.choices(group, k=len(group))]


def ratio_of_grouped(
    numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]
) -> Interval:
    """Return the ratio of two medians of grouped samples with its bootstrap interval.

    With equally many groups on both sides, at least ``MIN_PAIRS``, returns the ``paired_ratio`` of
    their medians: groups of a pair ran one after the other, so slow drift of the machine cancels.
    Otherwise resamples both sides independently.
    """
    if len(numerators) == len(denominators) >= MIN_PAIRS:
        return paired_ratio([median(g) for g in numerators], [median(g) for g in denominators])
    above = [value for group in numerators for value in group]
    below = [value for group in denominators for value in group]
    point = median(above) / median(below)
    if min(len(above), len(below)) < 2:
        return Interval(point)
    rng = random.Random(0)
    drawn = sorted(
        median(_resample(numerators, rng)) / median(_resample(denominators, rng))
        for _ in range(RESAMPLES)
    )
    return _percentiles(point, drawn)


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Return the median of the ratios of pairs, with its bootstrap interval over pairs."""
    return bootstrap([a / b for a, b in zip(numerators, denominators, strict=True)])


def _percentiles(point: float, drawn: Sequence[float]) -> Interval:
    tail = (1 - CONFIDENCE_LEVEL) / 2
    return Interval(point, quantile(drawn, tail), quantile(drawn, 1 - tail))


def change_point(values: Sequence[float], p_below: float = 0.01) -> ChangePoint | None:
    """Return the most likely single jump in a series, or None if it is not significant.

    Pettitt's statistic K is the largest Mann-Whitney U over all splits; p is approximately
    2 exp(-6 K² / (n³ + n²)). Fewer than 8 values return None.
    """
    n = len(values)
    if n < 8:
        return None
    statistic, index = max(_pettitt(values))
    p = min(1.0, 2 * math.exp(-6 * statistic**2 / (n**3 + n**2)))
    if p >= p_below:
        return None
    return ChangePoint(index, median(values[:index]), median(values[index:]), p)


def _pettitt(values: Sequence[float]) -> list[tuple[float, int]]:
    total = 0.0
    statistics_of_splits = []
    ordered = sorted(values)
    for split, value in enumerate(values[:-1], start=1):
        below = bisect.bisect_left(ordered, value)
        above = len(ordered) - bisect.bisect_right(ordered, value)
        total += below - above
        statistics_of_splits.append((abs(total), split))
    return statistics_of_splits
