"""Compares the speed of settings by pairs of runs.

Every run is a fresh process tree. The logarithms of the gains of all pairs on one machine are
fitted by least squares: settings that were never in one pair are compared over those between them,
and what the fit leaves is the noise. Two pairs of each then suffice for an interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nfold.core.stats import Interval, median
from nfold.explain.estimate.uncertainty import NORMAL_QUANTILE, STUDENT_T

MIN_NOISE = 0.002  # relative, of one pair: less is chance
WIDER = 1.5  # of twenty remedies without a gain, one may seem to have one at 95 %
PRECISE = 0.02  # half width of the final interval after which no more pairs are run
IS_ZERO = 1e-9


def t_quantile(degrees_of_freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    if degrees_of_freedom < 1:
        return STUDENT_T[0]
    if degrees_of_freedom <= len(STUDENT_T):
        return STUDENT_T[degrees_of_freedom - 1]
    return NORMAL_QUANTILE + 2.5 / degrees_of_freedom


@dataclass
class NoisePool:
    """The variance of the logarithm of the gain of one pair, from pairs that were to be equal."""

    squares: float = 0.0
    degrees_of_freedom: int = 0

    def merge(self, other: NoisePool) -> NoisePool:
        """Return the noise of the pairs of both."""
        degrees_of_freedom = self.degrees_of_freedom + other.degrees_of_freedom
        return NoisePool(self.squares + other.squares, degrees_of_freedom)

    @property
    def deviation(self) -> float:
        """The standard deviation of one pair."""
        variance = self.squares / self.degrees_of_freedom if self.degrees_of_freedom else 0.0
        return max(MIN_NOISE, math.sqrt(variance))


@dataclass(frozen=True)
class Pair:
    """A run of ``old`` and one of ``new``, with their milliseconds per sample.

    ``log_gain`` is the logarithm of the factor by which ``new`` was faster.
    """

    old: object
    new: object
    old_ms: float
    new_ms: float
    log_gain: float


@dataclass
class PairSeries:
    """Pairs of runs under equal conditions."""

    pairs: list[Pair] = field(default_factory=list)

    def count(self, new: object) -> int:
        return sum(one.new == new for one in self.pairs)

    def step_ms(self, what: object, batch: int) -> float | None:
        """Return the median milliseconds of a step of ``batch`` samples, None without runs."""
        old = [one.old_ms for one in self.pairs if one.old == what]
        found = old + [one.new_ms for one in self.pairs if one.new == what]
        return median(found) * batch if found else None

    def gain(self, old: object, new: object, pool: NoisePool) -> Interval | None:
        """Return the factor by which ``new`` is faster, with its 95 % interval.

        None if no pairs connect them.
        """
        names, matrix, log_gains = self._equations()
        if old not in names or new not in names:
            return None
        wanted = _difference(names, old, new)
        weights = wanted @ np.linalg.pinv(matrix)  # of the pairs in the estimate
        if np.abs(weights @ matrix - wanted).max() > IS_ZERO:
            return None
        mean, spread = float(weights @ log_gains), float(np.hypot.reduce(weights))
        half = t_quantile(pool.degrees_of_freedom) * pool.deviation * spread
        return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))

    def noise(self) -> NoisePool:
        """Return what the fit leaves; of a pair of equal settings that is all of its gain."""
        if not self.pairs:
            return NoisePool()
        _, matrix, log_gains = self._equations()
        inverse = np.linalg.pinv(matrix)
        left = log_gains - matrix @ (inverse @ log_gains)
        rank = round(float(np.trace(matrix @ inverse)))
        return NoisePool(float(left @ left), len(self.pairs) - rank)

    def _equations(self) -> tuple[list[object], NDArray[np.float64], NDArray[np.float64]]:
        """Return the settings, a row for each pair with -1 and 1 at its settings, and the gains."""
        names = list(dict.fromkeys(what for one in self.pairs for what in (one.old, one.new)))
        rows = [_difference(names, one.old, one.new) for one in self.pairs]
        return names, np.array(rows), np.array([one.log_gain for one in self.pairs])


def _difference(names: list[object], old: object, new: object) -> NDArray[np.float64]:
    row = np.zeros(len(names))
    row[names.index(new)] += 1
    row[names.index(old)] -= 1
    return row


def is_gain(gain: Interval, least: float) -> bool:
    """Return whether a gain found among many is above ``least``, with an interval ``WIDER`` times as wide."""
    assert gain.low is not None
    low = math.log(gain.value) - WIDER * math.log(gain.value / gain.low)
    return low > math.log(least)


def is_precise(gain: Interval) -> bool:
    return gain.low is not None and math.log(gain.value / gain.low) < PRECISE
