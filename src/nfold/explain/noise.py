"""How far off one run may be: what is left between runs, or where those are few, what is known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

LEAST_FREE = 3
"""From so many degrees of freedom on, rests between runs are drawn, whatever the scatter inside."""
APART = 0.03
"""Relative error of a process tree before any was repeated: two of one and the same plan were 4 %
apart on two H200s (decision 27), which no look inside one shows."""
INSIDE = 0.014
"""The same of a turn in a tree: in 14 explanations of one healthy script on two idle CPU cores,
what two turns differ by varied from tree to tree by 2.0 % of a step (standard deviation)."""
APART_AHEAD, INSIDE_AHEAD = 0.01, 0.005
"""The same where a device is what every step waits for, because the host is a step ahead of it or
more. Equal work is then as long as where its tensors lie makes it: one network's forward took 5.8
to 6.4 of 22 ms on an H100 at one clock, as often as it was made anew (decision 51)."""
T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t for a 95 % interval, by degrees of freedom from 1."""
NORMAL = 1.96
Scatters = tuple[Sequence[float], Sequence[float]]
"""Relative errors inside runs whose hosts are not ahead of their devices, and inside the others."""


@dataclass(frozen=True)
class Noise:
    """Relative errors: one of ``rests``, or where there are none, normal ones. How ``wide`` those
    are is told of rungs whose host is not ahead of its devices, and of the others.
    """

    wide: tuple[float, float]
    rests: tuple[float, ...] = ()

    def draw(self, draws: random.Random) -> float:
        """What is drawn once where rungs share it."""
        return draws.choice(self.rests) if self.rests else draws.gauss(0, 1)

    def error(self, drawn: float, *, ahead: bool) -> float:
        """What was drawn, as the error of one rung."""
        return drawn if self.rests else drawn * self.wide[ahead]

    def scale(self, *, ahead: bool) -> float:
        """The root of the mean square of an error."""
        return math.sqrt(fmean(rest**2 for rest in self.rests)) if self.rests else self.wide[ahead]


def of_runs(rests: Sequence[float], free: int, scatters: Scatters) -> Noise:
    """Of a process tree. ``free`` are the degrees of freedom of the ``rests``."""
    return _noise(rests, free, scatters, (APART, APART_AHEAD))


def of_turns(rests: Sequence[float], free: int, inside: Sequence[float]) -> Noise:
    """Of a turn in one; errors of so much were seen ``inside`` trees."""
    return _noise(rests, free, (inside, inside), (INSIDE, INSIDE_AHEAD))


def _noise(
    rests: Sequence[float], free: int, scatters: Scatters, least: tuple[float, float]
) -> Noise:
    """From rests that are enough, widened for as few as they are; else by what runs show inside,
    each at least ``least``, or the few rests where those are larger.
    """
    if free >= LEAST_FREE:
        wider = math.sqrt(len(rests) / free) * (T[free - 1] if free <= len(T) else NORMAL) / NORMAL
        return Noise((0.0, 0.0), tuple(rest * wider for rest in rests))
    between = math.sqrt(math.fsum(rest**2 for rest in rests) / free) if free > 0 else 0.0
    behind, ahead = (max(_inside(*both), between) for both in zip(scatters, least, strict=True))
    return Noise((behind, ahead))


def _inside(scatters: Sequence[float], least: float) -> float:
    return math.sqrt(fmean(max(s, least) ** 2 for s in scatters)) if scatters else 0.0
