"""Estimate the relative errors of runs: from their residuals, or from prior values if these are few."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from nfold.core.stats import MAD_TO_SIGMA
from nfold.explain.estimate.median_polish import Member

# With at least so many degrees of freedom, errors are estimated from residuals alone.
MIN_DEGREES_OF_FREEDOM = 3
# Relative errors before a trial was repeated (docs/decisions/statistics.md). Two process trees of
# the same plan were 4 % apart on two H200s, which no measurement within a tree shows. In 14
# explanations of a healthy script on two idle CPU cores, the difference of two interleaved trials
# varied from tree to tree by 2.0 % of a step (standard deviation).
INTER_TREE_ERROR, INTRA_TREE_ERROR = 0.03, 0.014
# The same if the host is at least a step ahead, so that a step waits for the device only. Equal work
# then depends on where its tensors lie: the forward of one network took 5.8 to 6.4 of 22 ms on an
# H100 at one clock, each time the network was built anew.
INTER_TREE_ERROR_HOST_AHEAD, INTRA_TREE_ERROR_HOST_AHEAD = 0.01, 0.005
# Student's t for a 95 % interval, by degrees of freedom from 1.
# fmt: off
STUDENT_T = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13,
)
# fmt: on
NORMAL_QUANTILE = 1.96


@dataclass(frozen=True)
class ErrorModel:
    """The distribution of a relative error: the sorted ``residuals``, or a normal one without them."""

    standard_deviation: float
    residuals: tuple[float, ...] = ()

    def errors(self, drawn: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return errors from standard normal draws, which may be shared."""
        if not self.residuals:
            return self.standard_deviation * drawn
        ranks = drawn.argsort().argsort()
        return np.asarray(self.residuals)[ranks * len(self.residuals) // len(drawn)]

    @property
    def root_mean_square(self) -> float:
        return _root_mean_square(self.residuals) if self.residuals else self.standard_deviation


def run_error_model(
    residuals: Sequence[float],
    degrees_of_freedom: float,
    standard_errors: Sequence[float],
    *,
    host_ahead: bool,
) -> ErrorModel:
    """Return the error of a process tree.

    From the ``residuals`` of all trees, scaled for their degrees of freedom, if these are enough.
    Else from the ``standard_errors`` within runs, each at least the prior error, or from the few
    residuals if these are larger.
    """
    if degrees_of_freedom >= MIN_DEGREES_OF_FREEDOM:
        scale = math.sqrt(len(residuals) / degrees_of_freedom) * _student_factor(degrees_of_freedom)
        return ErrorModel(0.0, tuple(sorted(residual * scale for residual in residuals)))
    prior = INTER_TREE_ERROR_HOST_AHEAD if host_ahead else INTER_TREE_ERROR
    known = [max(error, prior) for error in standard_errors]
    observed = math.fsum(residual**2 for residual in residuals)
    return ErrorModel(
        max(
            _root_mean_square(known) if known else 0.0,
            math.sqrt(observed / degrees_of_freedom) if degrees_of_freedom > 0 else 0.0,
        )
    )


def interleaving_errors(
    residuals: Mapping[Member, Sequence[float]],
    degrees_of_freedom: float,
    within_errors: Mapping[tuple[Member, int], float],
    trees: Mapping[tuple[Member, int], str],
    *,
    host_ahead: bool,
) -> dict[tuple[Member, int], float]:
    """Return the error of every interleaved run, without the error of its tree.

    ``residuals`` are those of repeated trials, ``within_errors`` the errors observed within
    ``trees``. Some trials scatter more than others, those with real input above all: each has its
    own error, at least the typical one.
    """
    every = [abs(residual) for own in residuals.values() for residual in own]
    scale = math.sqrt(len(every) / degrees_of_freedom) if degrees_of_freedom > 0 else 0.0
    usual = scale * MAD_TO_SIGMA * median(every) if every else 0.0
    own_errors = {one: max(usual, scale * _root_mean_square(r)) for one, r in residuals.items()}
    if degrees_of_freedom >= MIN_DEGREES_OF_FREEDOM:
        factor = _student_factor(degrees_of_freedom)
        return {run: factor * own_errors.get(run[0], usual) for run in trees}
    by_tree: dict[str, list[float]] = {}
    for run, tree in trees.items():
        by_tree.setdefault(tree, []).append(within_errors.get(run, 0.0))
    prior = INTRA_TREE_ERROR_HOST_AHEAD if host_ahead else INTRA_TREE_ERROR
    return {
        run: max(
            prior, median(by_tree[tree]), within_errors.get(run, 0.0), own_errors.get(run[0], usual)
        )
        for run, tree in trees.items()
    }


def _student_factor(degrees_of_freedom: float) -> float:
    return (
        STUDENT_T[int(degrees_of_freedom) - 1]
        if degrees_of_freedom < len(STUDENT_T) + 1
        else NORMAL_QUANTILE
    ) / NORMAL_QUANTILE


def _root_mean_square(errors: Sequence[float]) -> float:
    return math.sqrt(fmean(error**2 for error in errors))
