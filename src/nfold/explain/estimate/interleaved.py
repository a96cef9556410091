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

from nfold.core.interleave import MAX_CYCLES
from nfold.core.measurement import Measurement, RankSamples
from nfold.explain.design import Trial
from nfold.explain.estimate.median_polish import (
    MEDIAN_ERROR_RATIO,
    MetricKey,
    ValuesByRound,
    log_values,
    polish_cycles,
)
from nfold.explain.metrics import Metrics, additive_metrics, step_metrics


@dataclass(frozen=True)
class StepTimeChange:
    """What a step took at least and at most, or first and last, in milliseconds."""

    low_ms: float
    high_ms: float

    @property
    def ratio(self) -> float:
        """The most over the least, or the last over the first."""
        return self.high_ms / self.low_ms

    @property
    def magnitude(self) -> float:
        """The larger of both over the other."""
        return max(self.ratio, 1 / self.ratio)


def interleaved_metrics(
    members: Mapping[Trial, Measurement],
) -> tuple[dict[Trial, Metrics], dict[Trial, float]]:
    """The readings of rungs that shared a process tree, and the relative error of their steps.

    That error does not hold what differs by process tree; it is 0 where nothing tells it. What may
    be 0 or less has no logarithm and is read over all cycles.
    """
    count, table = _metrics_by_cycle(members)
    found = {rung: additive_metrics(measurement) for rung, measurement in members.items()}
    effects, rests = polish_cycles({key: log_values(cycles) for key, cycles in table.items()})
    for (rung, name), effect in effects.items():
        found[rung][name] = math.exp(effect)
    free = (1 - 1 / len(members)) * (count - 1)
    return found, {r: _median_error(rests[r, "step"], free) if free else 0.0 for r in members}


def unsteady_steps(members: Mapping[Trial, Measurement]) -> StepTimeChange | None:
    """From which to which cycle a step took how long that was the same in all of them.

    Its batches are given again: of such rungs that shared a process tree, the one in the middle, or
    of two there the one that swings more.
    """
    found = []
    for rung, measurement in members.items():
        if rung.variant.input != "real":
            steps = _step_by_cycle(rung, measurement).values()
            found += [StepTimeChange(min(steps), max(steps))] if steps else []
    return sorted(found, key=lambda one: one.ratio)[len(found) // 2] if found else None


def changing_batches(members: Mapping[Trial, Measurement]) -> StepTimeChange | None:
    """From the first to the last cycle of the real run, if its steps grew or shrank in each.

    None where those with given batches did so as well, or there are none of both: what is left is
    in the batches.
    """
    real, given = (
        _median_by_cycle(m for m in members.items() if (m[0].variant.input == "real") == same)
        for same in (True, False)
    )
    if not given or len(real) < MAX_CYCLES or len(real) != len(given):
        return None
    left = [mine / others for mine, others in zip(real, given, strict=True)]
    if left not in (sorted(left), sorted(left, reverse=True)):
        return None
    return StepTimeChange(real[0], real[0] * left[-1] / left[0])


def _step_by_cycle(trial: Trial, measurement: Measurement) -> dict[int, float]:
    _, table = _metrics_by_cycle({trial: measurement})
    return table.get((trial, "step"), {})


def _median_by_cycle(members: Iterable[tuple[Trial, Measurement]]) -> list[float]:
    every: dict[int, list[float]] = {}
    for rung, measurement in members:
        for cycle, step_ms in _step_by_cycle(rung, measurement).items():
            every.setdefault(cycle, []).append(step_ms)
    return [median(every[cycle]) for cycle in sorted(every)]


def _metrics_by_cycle(
    members: Mapping[Trial, Measurement],
) -> tuple[int, dict[MetricKey, dict[int, float]]]:
    ranks = [rank for m in members.values() for rank in m.ranks if rank.windows]
    count = min([MAX_CYCLES, *(len(rank.windows) for rank in ranks)])
    table: dict[MetricKey, dict[int, float]] = {}
    for rung, measurement in members.items():
        for cycle, part in enumerate(split_by_cycle(measurement, count)):
            for name, value in step_metrics(part, ranks_synchronize=rung.ranks_synchronize).items():
                table.setdefault((rung, name), {})[cycle] = value
    return count, table


def _median_error(residuals: ValuesByRound, degrees_of_freedom: float) -> float:
    of_one = sum(rest**2 for rest in residuals.values()) / degrees_of_freedom
    return MEDIAN_ERROR_RATIO * math.sqrt(of_one / len(residuals))


def split_by_cycle(measurement: Measurement, count: int) -> list[Measurement]:
    """Its windows in ``count`` parts of about as many steps each, in their order."""
    ranks = [_split_rank(rank, count) for rank in measurement.ranks]
    return [
        dataclasses.replace(measurement, ranks=tuple(parts)) for parts in zip(*ranks, strict=True)
    ]


def _split_rank(rank: RankSamples, count: int) -> list[RankSamples]:
    ends = list(accumulate(window.steps for window in rank.windows))
    middles = (end - window.steps / 2 for end, window in zip(ends, rank.windows, strict=True))
    return rank.split_windows([min(count - 1, int(count * at / ends[-1])) for at in middles], count)
