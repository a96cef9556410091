"""How far off one run may be: what is left between runs, or where those are few, what is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median

from nfold.explain.polish import What
from nfold.stats import OF_DEVIATION

LEAST_FREE = 3
"""From so many degrees of freedom on, rests between runs are drawn, whatever the scatter inside."""
APART = 0.03
"""Relative error of a process tree before any was repeated: two of one and the same plan were 4 %
apart on two H200s (docs/decisions/experiment-design.md), which no look inside one shows."""
INSIDE = 0.014
"""The same of a turn in a tree: in 14 explanations of one healthy script on two idle CPU cores,
what two turns differ by varied from tree to tree by 2.0 % of a step (standard deviation)."""
APART_AHEAD, INSIDE_AHEAD = 0.01, 0.005
"""The same where a device is what every step waits for, because the host is a step ahead of it or
more. Equal work is then as long as where its tensors lie makes it: one network's forward took 5.8
to 6.4 of 22 ms on an H100 at one clock, as often as it was made anew (docs/decisions/statistics.md)."""
T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t for a 95 % interval, by degrees of freedom from 1."""
NORMAL = 1.96
LEAST_DRAWN = 1e-9
"""Of what is drawn between 0 and 1: 0 itself has no error."""
STANDARD = NormalDist()


@dataclass(frozen=True)
class Noise:
    """Relative errors: one of ``rests``, in order, or where there are none, so ``wide`` ones."""

    wide: float
    rests: tuple[float, ...] = ()

    def error(self, drawn: float) -> float:
        """The one that so large a part of all is below: what is drawn once may be shared."""
        if self.rests:
            return self.rests[int(drawn * len(self.rests))]
        return self.wide * STANDARD.inv_cdf(max(drawn, LEAST_DRAWN))

    @property
    def scale(self) -> float:
        """The root of the mean square of an error."""
        return _root_mean_square(self.rests) if self.rests else self.wide


def of_runs(
    rests: Sequence[float], free: float, scatters: Sequence[float], *, ahead: bool
) -> Noise:
    """Of a process tree. ``free`` are the degrees of freedom of the ``rests``.

    From rests that are enough, widened for as few as they are; else by how runs ``scatter`` inside,
    each at least as much as is known from elsewhere, or the few rests where those are larger.
    """
    if free >= LEAST_FREE:
        wider = math.sqrt(len(rests) / free) * _wider(free)
        return Noise(0.0, tuple(sorted(rest * wider for rest in rests)))
    least = APART_AHEAD if ahead else APART
    inside = _root_mean_square([max(s, least) for s in scatters]) if scatters else 0.0
    between = math.sqrt(math.fsum(rest**2 for rest in rests) / free) if free > 0 else 0.0
    return Noise(max(inside, between))


def of_turns(
    rests: Mapping[What, Sequence[float]],
    free: float,
    inside: Mapping[tuple[What, int], float],
    trees: Mapping[tuple[What, int], str],
    *,
    ahead: bool,
) -> dict[tuple[What, int], float]:
    """How far off every turn may be, of its kind and in its tree.

    ``rests`` are those of turns that were repeated, ``inside`` the errors that were seen inside
    ``trees``. One kind scatters more than others, real input above all; none is surer than most.
    """
    every = [abs(rest) for own in rests.values() for rest in own]
    lost = math.sqrt(len(every) / free) if free > 0 else 0.0
    usual = lost * OF_DEVIATION * median(every) if every else 0.0
    between = {w: max(usual, lost * _root_mean_square(own)) for w, own in rests.items()}
    if free >= LEAST_FREE:
        return {run: _wider(free) * between.get(run[0], usual) for run in trees}
    seen: dict[str, list[float]] = {}
    for run, tree in trees.items():
        seen.setdefault(tree, []).append(inside.get(run, 0.0))
    least = INSIDE_AHEAD if ahead else INSIDE
    return {
        run: max(least, median(seen[tree]), inside.get(run, 0.0), between.get(run[0], usual))
        for run, tree in trees.items()
    }


def _wider(free: float) -> float:
    """By so much a 95 % interval of so few degrees of freedom is wider than a normal one."""
    return (T[int(free) - 1] if free < len(T) + 1 else NORMAL) / NORMAL


def _root_mean_square(errors: Sequence[float]) -> float:
    return math.sqrt(fmean(error**2 for error in errors))
