"""How long runs are, by how long their steps take. Pure functions.

The same for every time budget, so that with a larger one the earlier runs are found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from nfold.explain import lines
from nfold.explain.causes.idle import busy_ms
from nfold.explain.ladder import Ladder
from nfold.explain.rung import Rung
from nfold.plan import FEWEST_STEPS, LONG_STEP_S, WARMUP_STEPS
from nfold.turns import schedule

LEAST_STEPS, MOST_STEPS = 20, 2000
TIMED_S = 2.0
"""What a run is to time of a rung: about as long as it takes to start one."""
TIMED_IN_TURNS_S = {"cuda": 1.0, "cpu": 3.0}
"""Where rungs that are compared share a run. On a CPU everything else on the host is in a step.

Of a script whose passes over its data are shorter than that, at least TIMED_S: a pass begins with
a wait for its first batch, and of two passes one may take a quarter longer.
"""
TIMED_OF_OPERATION_S = 0.5
"""Of each of an operation's parts, some ten in a run."""
WARMUP_S = 5.0
"""The longest warm-up, and the longest time that queues of loaders get to settle in a turn."""
FEWEST_WARMUP, OF_SEVERAL = 3, 7
"""Steps of a script's that are long; several optimizers show which steps least often."""
FACTORS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""Of round numbers: a run is at most half as long again as it should be."""


def long_enough(ladder: Ladder, step_s: float, *, in_turns: bool) -> Ladder:
    """Its plan with as many steps as are to be timed and let pass, in round numbers."""
    step_s = max(1e-6, step_s)
    timed_s = _timed_s(ladder, step_s) if in_turns else TIMED_S
    timed_s = TIMED_OF_OPERATION_S if ladder.operation else timed_s
    least = min(LEAST_STEPS, max(FEWEST_STEPS, rounded(LEAST_STEPS * LONG_STEP_S / step_s)))
    timed = ladder.plan.edit(
        steps=min(MOST_STEPS, max(least, rounded(timed_s / step_s))),
        epochs=None,
        warmup_steps=_warmup(ladder, rounded(WARMUP_S / step_s)),
    )
    return dataclasses.replace(ladder, plan=timed, made={})


def _timed_s(ladder: Ladder, step_s: float) -> float:
    """Of each rung of a run in turns."""
    timed_s = TIMED_IN_TURNS_S[str(ladder.plan.device)]
    batches = lines.loader(ladder.seen).batches if ladder.seen is not None else None
    if batches is None or batches / ladder.plan.accumulate * step_s > timed_s:
        return timed_s
    return max(timed_s, TIMED_S)


def _warmup(ladder: Ladder, in_time: int) -> int:
    """As many as the plan has, or ``in_time``; of a script whose steps are long, what it needs."""
    planned = ladder.plan.warmup_steps or WARMUP_STEPS
    least = WARMUP_STEPS
    if ladder.seen is not None:
        fewest = FEWEST_WARMUP if len(ladder.seen.optimizers) < 2 else OF_SEVERAL
        queued = max(0, planned - WARMUP_STEPS)
        least = min(least, max(fewest, in_time) + queued)
    return min(planned, max(least, in_time))


def turns_s(ladder: Ladder, rungs: Sequence[Rung], step_s: float) -> float:
    """Seconds of the steps of these, which take turns, where a step of the real run takes so long.

    One whose batches are given again does not wait for them, as far as a first look saw that.
    """
    given_s = step_s
    if ladder.seen is not None:
        given_s = max(step_s - ladder.seen.input_wait_ms / 1e3, (busy_ms(ladder) or 0.0) / 1e3)
    turns, seconds, each_s = [rung.ablation for rung in rungs], 0.0, step_s
    for part in reversed(schedule(turns, rungs[0].plan)):
        # Steps in which a change takes effect are like those after them.
        if part.turn is not None:
            each_s = step_s if turns[part.turn].input == "real" else given_s
        seconds += part.steps * each_s
    return seconds


def rounded(steps: float) -> int:
    """The next of 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, ... from ``steps`` on."""
    size = 1
    while True:
        for factor in FACTORS:
            if (found := math.ceil(factor * size)) >= steps:
                return found
        size *= 10
