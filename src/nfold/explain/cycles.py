"""From rungs that took turns in one process tree to the readings of each. Pure functions.

Every cycle is read by itself. What it does to all of them, because a host is now faster and now
slower, is taken away as that of a round is, and what is left tells how far one may be off.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from nfold.explain.polish import OF_MEDIAN, Key, Rounds, in_cycles, logs
from nfold.explain.readings import Readings, sums, times
from nfold.explain.rung import Rung
from nfold.measurement import Measurement, RankSamples
from nfold.turns import CYCLES


@dataclass(frozen=True)
class Swing:
    """What a step took at least and at most, or first and last, in milliseconds."""

    low_ms: float
    high_ms: float

    @property
    def times(self) -> float:
        """The most over the least, or the last over the first."""
        return self.high_ms / self.low_ms

    @property
    def apart(self) -> float:
        """The larger of both over the other."""
        return max(self.times, 1 / self.times)


def together(
    members: Mapping[Rung, Measurement],
) -> tuple[dict[Rung, Readings], dict[Rung, float]]:
    """The readings of rungs that shared a process tree, and the relative error of their steps.

    That error does not hold what differs by process tree; it is 0 where nothing tells it. What may
    be 0 or less has no logarithm and is read over all cycles.
    """
    count, table = _by_cycle(members)
    found = {rung: sums(measurement) for rung, measurement in members.items()}
    effects, rests = in_cycles({key: logs(cycles) for key, cycles in table.items()})
    for (rung, name), effect in effects.items():
        found[rung][name] = math.exp(effect)
    free = (1 - 1 / len(members)) * (count - 1)
    return found, {r: _error(rests[r, "step"], free) if free else 0.0 for r in members}


def swing(members: Mapping[Rung, Measurement]) -> Swing | None:
    """From which to which cycle a step took how long that was the same in all of them.

    Its batches are given again: of such rungs that shared a process tree, the one in the middle, or
    of two there the one that swings more.
    """
    found = []
    for rung, measurement in members.items():
        if rung.ablation.input != "real":
            steps = _steps(rung, measurement).values()
            found += [Swing(min(steps), max(steps))] if steps else []
    return sorted(found, key=lambda one: one.times)[len(found) // 2] if found else None


def trend(members: Mapping[Rung, Measurement]) -> Swing | None:
    """From the first to the last cycle of the real run, if its steps grew or shrank in each.

    None where those with given batches did so as well, or there are none of both: what is left is
    in the batches.
    """
    real, given = (
        _middle(m for m in members.items() if (m[0].ablation.input == "real") == same)
        for same in (True, False)
    )
    if not given or len(real) < CYCLES or len(real) != len(given):
        return None
    left = [mine / others for mine, others in zip(real, given, strict=True)]
    if left not in (sorted(left), sorted(left, reverse=True)):
        return None
    return Swing(real[0], real[0] * left[-1] / left[0])


def _steps(rung: Rung, measurement: Measurement) -> dict[int, float]:
    """A step of each of its cycles, as far as any was timed."""
    _, table = _by_cycle({rung: measurement})
    return table.get((rung, "step"), {})


def _middle(members: Iterable[tuple[Rung, Measurement]]) -> list[float]:
    """Of each cycle, the step in the middle of these rungs."""
    every: dict[int, list[float]] = {}
    for rung, measurement in members:
        for cycle, step_ms in _steps(rung, measurement).items():
            every.setdefault(cycle, []).append(step_ms)
    return [median(every[cycle]) for cycle in sorted(every)]


def _by_cycle(
    members: Mapping[Rung, Measurement],
) -> tuple[int, dict[Key, dict[int, float]]]:
    """As many cycles as all of these have windows for, and what is above 0 in each."""
    ranks = [rank for m in members.values() for rank in m.ranks if rank.windows]
    count = min([CYCLES, *(len(rank.windows) for rank in ranks)])
    table: dict[Key, dict[int, float]] = {}
    for rung, measurement in members.items():
        for cycle, part in enumerate(divided(measurement, count)):
            for name, value in times(part, coupled=rung.coupled).items():
                table.setdefault((rung, name), {})[cycle] = value
    return count, table


def _error(rests: Rounds, free: float) -> float:
    """Of one rung's median over its cycles; ``free`` are its part of the degrees of freedom."""
    of_one = sum(rest**2 for rest in rests.values()) / free
    return OF_MEDIAN * math.sqrt(of_one / len(rests))


def divided(measurement: Measurement, count: int) -> list[Measurement]:
    """Its windows in ``count`` parts of about as many steps each, in their order."""
    ranks = [_divided(rank, count) for rank in measurement.ranks]
    return [
        dataclasses.replace(measurement, ranks=tuple(parts)) for parts in zip(*ranks, strict=True)
    ]


def _divided(rank: RankSamples, count: int) -> list[RankSamples]:
    ends = list(accumulate(window.steps for window in rank.windows))
    middles = (end - window.steps / 2 for end, window in zip(ends, rank.windows, strict=True))
    return rank.divided([min(count - 1, int(count * at / ends[-1])) for at in middles], count)
