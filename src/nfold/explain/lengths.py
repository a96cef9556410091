"""How long runs are, by how long their steps take. Pure functions.

The same for every time budget, so that with a larger one the earlier runs are found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from nfold.explain import lines
from nfold.explain.causes.idle import device_busy_ms
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.rung import Trial
from nfold.plan import LONG_STEP_S, MIN_TIMED_STEPS, WARMUP_STEPS
from nfold.turns import schedule_slots

MIN_STEPS, MAX_STEPS = 20, 2000
TIMED_S = 2.0
"""What a run is to time of a rung: about as long as it takes to start one."""
TIMED_INTERLEAVED_S = {"cuda": 1.0, "cpu": 3.0}
"""Where rungs that are compared share a run. On a CPU everything else on the host is in a step.

Of a script whose passes over its data are shorter than that, at least TIMED_S: a pass begins with
a wait for its first batch, and of two passes one may take a quarter longer.
"""
TIMED_OPERATION_S = 0.5
"""Of each of an operation's parts, some ten in a run."""
MAX_WARMUP_S = 5.0
"""The longest warm-up, and the longest time that queues of loaders get to settle in a turn."""
MIN_WARMUP_STEPS, MIN_WARMUP_SEVERAL_OPTIMIZERS = 3, 7
"""Steps of a script's that are long; several optimizers show which steps least often."""
ROUND_FACTORS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""Of round numbers: a run is at most half as long again as it should be."""


def with_run_length(
    design: ExperimentDesign, step_s: float, *, interleaved: bool
) -> ExperimentDesign:
    """Its plan with as many steps as are to be timed and let pass, in round numbers."""
    step_s = max(1e-6, step_s)
    timed_s = _timed_s(design, step_s) if interleaved else TIMED_S
    timed_s = TIMED_OPERATION_S if design.is_operation else timed_s
    least = min(MIN_STEPS, max(MIN_TIMED_STEPS, round_up(MIN_STEPS * LONG_STEP_S / step_s)))
    timed = design.plan.edit(
        steps=min(MAX_STEPS, max(least, round_up(timed_s / step_s))),
        epochs=None,
        warmup_steps=_warmup_steps(design, round_up(MAX_WARMUP_S / step_s)),
    )
    return dataclasses.replace(design, plan=timed, trial_cache={})


def _timed_s(design: ExperimentDesign, step_s: float) -> float:
    """Of each rung of a run in turns."""
    timed_s = TIMED_INTERLEAVED_S[str(design.plan.device)]
    batches = (
        lines.training_loader(design.profile).batches_per_epoch
        if design.profile is not None
        else None
    )
    if batches is None or batches / design.plan.accumulate * step_s > timed_s:
        return timed_s
    return max(timed_s, TIMED_S)


def _warmup_steps(design: ExperimentDesign, in_time: int) -> int:
    """As many as the plan has, or ``in_time``; of a script whose steps are long, what it needs."""
    planned = design.plan.warmup_steps or WARMUP_STEPS
    least = WARMUP_STEPS
    if design.profile is not None:
        fewest = (
            MIN_WARMUP_STEPS
            if len(design.profile.optimizers) < 2
            else MIN_WARMUP_SEVERAL_OPTIMIZERS
        )
        queued = max(0, planned - WARMUP_STEPS)
        least = min(least, max(fewest, in_time) + queued)
    return min(planned, max(least, in_time))


def interleaved_seconds(design: ExperimentDesign, trials: Sequence[Trial], step_s: float) -> float:
    """Seconds of the steps of these, which take turns, where a step of the real run takes so long.

    One whose batches are given again does not wait for them, as far as a first look saw that.
    """
    given_s = step_s
    if design.profile is not None:
        given_s = max(
            step_s - design.profile.input_wait_ms / 1e3, (device_busy_ms(design) or 0.0) / 1e3
        )
    turns, seconds, each_s = [rung.variant for rung in trials], 0.0, step_s
    for part in reversed(schedule_slots(turns, trials[0].plan)):
        # Steps in which a change takes effect are like those after them.
        if part.variant_index is not None:
            each_s = step_s if turns[part.variant_index].input == "real" else given_s
        seconds += part.steps * each_s
    return seconds


def round_up(steps: float) -> int:
    """The next of 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, ... from ``steps`` on."""
    size = 1
    while True:
        for factor in ROUND_FACTORS:
            if (found := math.ceil(factor * size)) >= steps:
                return found
        size *= 10
