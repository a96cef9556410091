"""Compute the metrics of interleaved trials, which share one process tree. Pure functions.

Every cycle is measured by itself. Drift of the host affects all trials of a cycle alike: a median
polish removes it, and the residuals are the error of each trial.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from nfold.core.interleave import MAX_CYCLES
from nfold.core.measurement import Measurement
from nfold.explain.design import Trial
from nfold.explain.estimate.median_polish import (
    MEDIAN_ERROR_RATIO,
    MetricKey,
    log_values,
    polish_cycles,
)
from nfold.explain.metrics import Metrics, additive_metrics, step_metrics


@dataclass(frozen=True)
class StepTimeChange:
    """Shortest and longest step, or first and last, in milliseconds."""

    low_ms: float
    high_ms: float

    @property
    def ratio(self) -> float:
        """Longest over shortest, or last over first."""
        return self.high_ms / self.low_ms

    @property
    def magnitude(self) -> float:
        """The larger of both over the smaller."""
        return max(self.ratio, 1 / self.ratio)


def interleaved_metrics(
    members: Mapping[Trial, Measurement],
) -> tuple[dict[Trial, Metrics], dict[Trial, float]]:
    """Return the metrics of trials that shared a process tree, and the relative errors of their steps.

    The errors exclude the error of the tree; they are 0 if there is one trial or one cycle.
    Additive metrics have no logarithm and are computed over all cycles.
    """
    count, table = _metrics_by_cycle(members)
    found = {trial: additive_metrics(measurement) for trial, measurement in members.items()}
    effects, residuals = polish_cycles({key: log_values(cycles) for key, cycles in table.items()})
    for (trial, name), effect in effects.items():
        found[trial][name] = math.exp(effect)
    free = (1 - 1 / len(members)) * (count - 1)
    errors = dict.fromkeys(members, 0.0)
    for trial in members if free else ():
        own = residuals[trial, "step"].values()
        deviation = math.sqrt(sum(residual**2 for residual in own) / free / len(own))
        errors[trial] = MEDIAN_ERROR_RATIO * deviation
    return found, errors


def unsteady_steps(members: Mapping[Trial, Measurement]) -> StepTimeChange | None:
    """Return the change of a step between cycles that repeat the same replayed batches.

    The median of the replayed trials of a process tree; the larger of two.
    """
    found = []
    for trial, measurement in members.items():
        if trial.variant.input != "real":
            steps = _step_by_cycle(trial, measurement).values()
            found += [StepTimeChange(min(steps), max(steps))] if steps else []
    return sorted(found, key=lambda change: change.ratio)[len(found) // 2] if found else None


def changing_batches(members: Mapping[Trial, Measurement]) -> StepTimeChange | None:
    """Return the change of the real run from the first to the last cycle, beyond replayed batches.

    None unless steps grow, or shrink, in every cycle.
    """
    by_cycle: dict[bool, dict[int, list[float]]] = {True: {}, False: {}}
    for trial, measurement in members.items():
        for cycle, step_ms in _step_by_cycle(trial, measurement).items():
            by_cycle[trial.variant.input == "real"].setdefault(cycle, []).append(step_ms)
    real, replayed = (
        [median(steps[cycle]) for cycle in sorted(steps)] for steps in by_cycle.values()
    )
    if not replayed or len(real) < MAX_CYCLES or len(real) != len(replayed):
        return None
    ratios = [one / other for one, other in zip(real, replayed, strict=True)]
    if ratios not in (sorted(ratios), sorted(ratios, reverse=True)):
        return None
    return StepTimeChange(real[0], real[0] * ratios[-1] / ratios[0])


def _step_by_cycle(trial: Trial, measurement: Measurement) -> dict[int, float]:
    _, table = _metrics_by_cycle({trial: measurement})
    return table.get((trial, "step"), {})


def _metrics_by_cycle(
    members: Mapping[Trial, Measurement],
) -> tuple[int, dict[MetricKey, dict[int, float]]]:
    ranks = [rank for m in members.values() for rank in m.ranks if rank.windows]
    count = min([MAX_CYCLES, *(len(rank.windows) for rank in ranks)])
    table: dict[MetricKey, dict[int, float]] = {}
    for trial, measurement in members.items():
        for cycle, part in enumerate(split_by_cycle(measurement, count)):
            metrics = step_metrics(part, ranks_synchronize=trial.ranks_synchronize)
            for name, value in metrics.items():
                table.setdefault((trial, name), {})[cycle] = value
    return count, table


def split_by_cycle(measurement: Measurement, count: int) -> list[Measurement]:
    """Split the windows into ``count`` consecutive parts of about as many steps."""
    ranks = []
    for rank in measurement.ranks:
        ends = list(accumulate(window.steps for window in rank.windows))
        middles = (end - window.steps / 2 for end, window in zip(ends, rank.windows, strict=True))
        parts = [min(count - 1, int(count * middle / ends[-1])) for middle in middles]
        ranks.append(rank.split_windows(parts, count))
    return [
        dataclasses.replace(measurement, ranks=tuple(parts)) for parts in zip(*ranks, strict=True)
    ]
