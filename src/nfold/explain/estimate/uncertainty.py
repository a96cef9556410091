"""How far off one run may be: what is left between runs, or where those are few, what is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median

from nfold.core.stats import MAD_TO_SIGMA
from nfold.explain.estimate.median_polish import Member

MIN_DEGREES_OF_FREEDOM = 3
"""From so many degrees of freedom on, rests between runs are drawn, whatever the scatter inside."""
INTER_TREE_ERROR = 0.03
"""Relative error of a process tree before any was repeated: two of one and the same plan were 4 %
apart on two H200s (docs/decisions/experiment-design.md), which no look inside one shows."""
INTRA_TREE_ERROR = 0.014
"""The same of a turn in a tree: in 14 explanations of one healthy script on two idle CPU cores,
what two turns differ by varied from tree to tree by 2.0 % of a step (standard deviation)."""
INTER_TREE_ERROR_HOST_AHEAD, INTRA_TREE_ERROR_HOST_AHEAD = 0.01, 0.005
"""The same where a device is what every step waits for, because the host is a step ahead of it or
more. Equal work is then as long as where its tensors lie makes it: one network's forward took 5.8
to 6.4 of 22 ms on an H100 at one clock, as often as it was made anew (docs/decisions/statistics.md)."""
STUDENT_T = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
)
"""Student's t for a 95 % interval, by degrees of freedom from 1."""
NORMAL_QUANTILE = 1.96
MIN_DRAW = 1e-9
"""Of what is drawn between 0 and 1: 0 itself has no error."""
STANDARD_NORMAL = NormalDist()


@dataclass(frozen=True)
class ErrorModel:
    """Relative errors: one of ``rests``, in order, or where there are none, so ``wide`` ones."""

    standard_deviation: float
    residuals: tuple[float, ...] = ()

    def error(self, drawn: float) -> float:
        """The one that so large a part of all is below: what is drawn once may be shared."""
        if self.residuals:
            return self.residuals[int(drawn * len(self.residuals))]
        return self.standard_deviation * STANDARD_NORMAL.inv_cdf(max(drawn, MIN_DRAW))

    @property
    def root_mean_square(self) -> float:
        """The root of the mean square of an error."""
        return _root_mean_square(self.residuals) if self.residuals else self.standard_deviation


def run_error_model(
    residuals: Sequence[float],
    degrees_of_freedom: float,
    standard_errors: Sequence[float],
    *,
    host_ahead: bool,
) -> ErrorModel:
    """Of a process tree. ``free`` are the degrees of freedom of the ``rests``.

    From rests that are enough, widened for as few as they are; else by how runs ``scatter`` inside,
    each at least as much as is known from elsewhere, or the few rests where those are larger.
    """
    if degrees_of_freedom >= MIN_DEGREES_OF_FREEDOM:
        wider = math.sqrt(len(residuals) / degrees_of_freedom) * _student_factor(degrees_of_freedom)
        return ErrorModel(0.0, tuple(sorted(rest * wider for rest in residuals)))
    least = INTER_TREE_ERROR_HOST_AHEAD if host_ahead else INTER_TREE_ERROR
    inside = _root_mean_square([max(s, least) for s in standard_errors]) if standard_errors else 0.0
    between = (
        math.sqrt(math.fsum(rest**2 for rest in residuals) / degrees_of_freedom)
        if degrees_of_freedom > 0
        else 0.0
    )
    return ErrorModel(max(inside, between))


def interleaving_errors(
    residuals: Mapping[Member, Sequence[float]],
    degrees_of_freedom: float,
    within_errors: Mapping[tuple[Member, int], float],
    trees: Mapping[tuple[Member, int], str],
    *,
    host_ahead: bool,
) -> dict[tuple[Member, int], float]:
    """How far off every turn may be, of its kind and in its tree.

    ``rests`` are those of turns that were repeated, ``inside`` the errors that were seen inside
    ``trees``. One kind scatters more than others, real input above all; none is surer than most.
    """
    every = [abs(rest) for own in residuals.values() for rest in own]
    lost = math.sqrt(len(every) / degrees_of_freedom) if degrees_of_freedom > 0 else 0.0
    usual = lost * MAD_TO_SIGMA * median(every) if every else 0.0
    between = {w: max(usual, lost * _root_mean_square(own)) for w, own in residuals.items()}
    if degrees_of_freedom >= MIN_DEGREES_OF_FREEDOM:
        return {
            run: _student_factor(degrees_of_freedom) * between.get(run[0], usual) for run in trees
        }
    seen: dict[str, list[float]] = {}
    for run, tree in trees.items():
        seen.setdefault(tree, []).append(within_errors.get(run, 0.0))
    least = INTRA_TREE_ERROR_HOST_AHEAD if host_ahead else INTRA_TREE_ERROR
    return {
        run: max(least, median(seen[tree]), within_errors.get(run, 0.0), between.get(run[0], usual))
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
