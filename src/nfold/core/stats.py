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
MIN_PAIRS = 3
"""From this many pairs on, a ratio is formed pair by pair."""

MAD_TO_SIGMA = 1.4826
"""A normal value's standard deviation over its median absolute deviation."""

Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Interval:
    """A value with its bootstrap interval; the bounds are None where one sample is all there is."""

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
    """The median of at least one value."""
    return statistics.median(values)


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The value with half of all weight (above 0) on either side; the mean of two there."""
    pairs = sorted(zip(values, weights, strict=True))
    ends = list(accumulate(weight for _, weight in pairs))
    half = ends[-1] / 2
    found = (find(ends, half) for find in (bisect.bisect_left, bisect.bisect_right))
    return statistics.fmean(pairs[at][0] for at in found)


def midmean(values: Sequence[float]) -> float:
    """The mean of the middle half of at least one value: of two kinds, as often, it is between."""
    ordered, cut = sorted(values), len(values) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def mad_deviation(values: Sequence[float]) -> float:
    """The standard deviation that normal values with this median absolute deviation have.

    A few values that are far off do not move it (F. R. Hampel, The Influence Curve, JASA 69, 1974).
    """
    usual = median(values)
    return MAD_TO_SIGMA * median([abs(one - usual) for one in values])


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q`` quantile (0 to 1) by linear interpolation between order statistics."""
    if not 0 <= q <= 1:
        raise ValueError(f"quantile {q} is outside 0 to 1")
    if not values:
        raise ValueError("no values have no quantile")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def bootstrap(values: Sequence[float], statistic: Statistic = median) -> Interval:
    """``statistic`` of independent samples with its 95 % percentile bootstrap interval."""
    return bootstrap_grouped([values], statistic)


def bootstrap_grouped(groups: Sequence[Sequence[float]], statistic: Statistic = median) -> Interval:
    """As ``bootstrap``, for samples that come in groups (the windows of several processes).

    Groups are drawn first and samples within each drawn group second, so that what differs
    between processes widens the interval. One group alone is resampled as plain samples.
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
    """The ratio of two medians of grouped samples, with its bootstrap interval.

    With as many groups above as below, at least ``PAIRS``, group i is paired with group i (they
    ran one after the other, so that slow drift of the machine cancels) and the median of the
    pairs' ratios is taken: ``paired_ratio``. Otherwise both sides are resampled on their own.
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
    """The median of the ratios formed pair by pair, with its bootstrap interval over pairs."""
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators against {len(denominators)} denominators")
    return bootstrap([a / b for a, b in zip(numerators, denominators, strict=True)])


def _percentiles(point: float, drawn: Sequence[float]) -> Interval:
    tail = (1 - CONFIDENCE_LEVEL) / 2
    return Interval(point, quantile(drawn, tail), quantile(drawn, 1 - tail))


def change_point(values: Sequence[float], p_below: float = 0.01) -> ChangePoint | None:
    """The most likely single jump in a series, or None where chance explains it.

    Pettitt's statistic is the largest Mann-Whitney U over all splits; p is approximately
    2 exp(-6 K² / (n³ + n²)). Fewer than 8 values never show a jump.
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
    found = []
    ordered = sorted(values)
    for split, value in enumerate(values[:-1], start=1):
        below = bisect.bisect_left(ordered, value)
        above = len(ordered) - bisect.bisect_right(ordered, value)
        total += below - above
        found.append((abs(total), split))
    return found
