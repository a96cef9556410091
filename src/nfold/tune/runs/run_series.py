"""Compares the speed of two settings by runs of both that alternate.

Every run is a fresh process tree. The logarithm of its time per sample is compared with those of the
runs of the other side before and after it, so that a drift of the machine cancels. The noise is
pooled over all comparisons of one machine: two runs of each then suffice for an interval.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from nfold.core.stats import Interval, median
from nfold.explain.estimate.uncertainty import NORMAL_QUANTILE, STUDENT_T

MIN_NOISE = 0.002  # relative, of one run: less is chance
WIDER = 1.5  # of twenty remedies without a gain, one may seem to have one at 95 %
PRECISE = 0.02  # half width of the final interval after which no more pairs are run


def t_quantile(degrees_of_freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    if degrees_of_freedom < 1:
        return STUDENT_T[0]
    if degrees_of_freedom <= len(STUDENT_T):
        return STUDENT_T[degrees_of_freedom - 1]
    return NORMAL_QUANTILE + 2.5 / degrees_of_freedom


@dataclass
class NoisePool:
    """The variance of the logarithm of one run, from runs that were to be equal."""

    squares: float = 0.0
    degrees_of_freedom: int = 0

    def merge(self, other: NoisePool) -> NoisePool:
        """Return the noise of the runs of both."""
        degrees_of_freedom = self.degrees_of_freedom + other.degrees_of_freedom
        return NoisePool(self.squares + other.squares, degrees_of_freedom)

    @property
    def deviation(self) -> float:
        """The standard deviation of one run."""
        variance = self.squares / self.degrees_of_freedom if self.degrees_of_freedom else 0.0
        return max(MIN_NOISE, math.sqrt(variance))


@dataclass
class RunSeries:
    """Runs in the order in which they were made: (what ran, time per sample)."""

    runs: list[tuple[object, float]] = field(default_factory=list)

    def add(self, what: object, time: float) -> None:
        self.runs.append((what, math.log(time)))

    def count(self, what: object) -> int:
        return sum(one == what for one, _ in self.runs)

    def step_ms(self, what: object, batch: int) -> float | None:
        """Return the median milliseconds of a step of ``batch`` samples, None without runs."""
        found = [math.exp(log_time) for one, log_time in self.runs if one == what]
        return median(found) * batch if found else None

    def runs_since(self, what: object) -> int:
        """Return how many runs there were after the last one of ``what``."""
        own = [place for place, (one, _) in enumerate(self.runs) if one == what]
        return len(self.runs) - 1 - own[-1] if own else len(self.runs) + 1

    def gain(self, old: object, new: object, pool: NoisePool) -> Interval | None:
        """Return the factor by which ``new`` is faster, with its 95 % interval; None without runs."""
        neighbours = self._neighbours(old, new)
        if not neighbours:
            return None
        times = [log_time for _, log_time in self.runs]
        weights: defaultdict[int, float] = defaultdict(float)  # of runs in the mean difference
        for place, near in neighbours.items():
            weights[place] -= 1 / len(neighbours)
            for other in near:
                weights[other] += 1 / len(near) / len(neighbours)
        mean = sum(weight * times[place] for place, weight in weights.items())
        deviation = pool.deviation * math.hypot(*weights.values())
        half = t_quantile(pool.degrees_of_freedom) * deviation
        return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))

    def _neighbours(self, old: object, new: object) -> dict[int, list[int]]:
        """Return for each run of ``new`` the runs of ``old`` before and after it, by their places."""
        places = [place for place, (one, _) in enumerate(self.runs) if one == old]
        found = {}
        for place, (one, _) in enumerate(self.runs):
            if one == new and places:
                before = [p for p in places if p < place][-1:]
                found[place] = before + [p for p in places if p > place][:1]
        return found

    def noise(self) -> NoisePool:
        """Return the noise of all settings that ran more than once.

        Of runs that follow each other with others between them, half the squared difference counts:
        a drift over the whole series does not.
        """
        pool = NoisePool()
        last: dict[object, float] = {}
        for what, log_time in self.runs:
            if what in last:
                pool.squares += (log_time - last[what]) ** 2 / 2
                pool.degrees_of_freedom += 1
            last[what] = log_time
        return pool


def is_gain(gain: Interval, least: float) -> bool:
    """Return whether a gain found among many is above ``least``, with an interval ``WIDER`` times as wide."""
    assert gain.low is not None
    low = math.log(gain.value) - WIDER * math.log(gain.value / gain.low)
    return low > math.log(least)


def is_precise(gain: Interval) -> bool:
    return gain.low is not None and math.log(gain.value / gain.low) < PRECISE
