"""Estimate the relative errors of runs from their residuals and from prior values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from nfold.core.stats import MAD_TO_SIGMA
from nfold.explain.estimate.median_polish import Member

MIN_DEGREES_OF_FREEDOM = 3  # with fewer, errors are mostly prior ones
PRIOR_DEGREES_OF_FREEDOM = 3
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


def run_error(
    residuals: Sequence[float],
    degrees_of_freedom: float,
    standard_errors: Sequence[float],
    *,
    host_ahead: bool,
) -> float:
    """Return the error of a process tree, from the ``residuals`` of all trees and the prior error.

    The prior error is at least each of ``standard_errors``, those within runs. Without any there is
    none.
    """
    prior = INTER_TREE_ERROR_HOST_AHEAD if host_ahead else INTER_TREE_ERROR
    known = [max(error, prior) for error in standard_errors]
    squares = math.fsum(residual**2 for residual in residuals)
    if not known:
        factor = student_factor(degrees_of_freedom)
        return factor * math.sqrt(squares / degrees_of_freedom) if degrees_of_freedom > 0 else 0.0
    return moderated_error(_root_mean_square(known), squares, degrees_of_freedom)


def moderated_error(prior: float, squares: float, degrees_of_freedom: float) -> float:
    """Return a standard error for normal quantiles, from a prior one and a sum of squares.

    The prior error counts as ``PRIOR_DEGREES_OF_FREEDOM``: the variance is the mean of both, weighted
    by their degrees of freedom, and Student's t widens it for their sum (G. K. Smyth, Linear Models
    and Empirical Bayes Methods, 2004). Without any residual it is the prior error.
    """
    prior_variance = (prior / student_factor(PRIOR_DEGREES_OF_FREEDOM)) ** 2
    degrees = PRIOR_DEGREES_OF_FREEDOM + degrees_of_freedom
    variance = (PRIOR_DEGREES_OF_FREEDOM * prior_variance + squares) / degrees
    return student_factor(degrees) * math.sqrt(variance)


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
    own error, and the typical one as its prior error.
    """
    every = [abs(residual) for own in residuals.values() for residual in own]
    scale = len(every) / degrees_of_freedom if degrees_of_freedom > 0 else 0.0
    usual_square = scale * (MAD_TO_SIGMA * median(every)) ** 2 if every else 0.0
    own_squares = {one: scale * fmean(r**2 for r in own) for one, own in residuals.items()}
    by_tree: dict[str, list[float]] = {}
    for run, tree in trees.items():
        by_tree.setdefault(tree, []).append(within_errors.get(run, 0.0))
    prior = INTRA_TREE_ERROR_HOST_AHEAD if host_ahead else INTRA_TREE_ERROR
    found = {}
    for run, tree in trees.items():
        least = max(prior, median(by_tree[tree]), within_errors.get(run, 0.0))
        square = max(usual_square, own_squares.get(run[0], usual_square))
        found[run] = moderated_error(least, degrees_of_freedom * square, degrees_of_freedom)
    return found


def student_factor(degrees_of_freedom: float) -> float:
    """Return Student's t over the normal quantile of a 95 % interval, for at least one degree."""
    return (
        STUDENT_T[int(degrees_of_freedom) - 1]
        if degrees_of_freedom < len(STUDENT_T) + 1
        else NORMAL_QUANTILE
    ) / NORMAL_QUANTILE


def _root_mean_square(errors: Sequence[float]) -> float:
    return math.sqrt(fmean(error**2 for error in errors))
