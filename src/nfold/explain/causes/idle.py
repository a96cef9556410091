"""The part of a script's step in which its device has nothing to do, and what its host does then.

Of one device alone with the input that costs least, whose host waits for no value: there the host's
pause between two steps holds no waiting for the device.
"""

from __future__ import annotations

from nfold.explain.ladder import Ladder
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.finding import FLOOR

AHEAD = 0.5
"""Of a step: a host that is further ahead when a window of several ends is not waited for."""


def told_by(ladder: Ladder) -> Rung:
    """That run."""
    return ladder.grown(ladder.unwaited)


def busy_ms(ladder: Ladder) -> float | None:
    """Of a step, as a trace has seen it on a GPU."""
    traced = ladder.seen.traced if ladder.seen is not None else None
    return None if traced is None else traced.busy_ms


def idle_ms(ladder: Ladder, view: View) -> float:
    """In which a GPU waits for its host."""
    alone = told_by(ladder)
    step_ms, ahead_ms = view.step(alone), view.ahead(alone)
    if ahead_ms is None or ahead_ms > AHEAD * step_ms:
        return 0.0
    return max(0.0, step_ms - (busy_ms(ladder) or 0.0))


def paused_ms(ladder: Ladder, view: View) -> float:
    """Of these, in which the host has neither asked for the next batch yet nor begun its step.

    Where nobody is seen to ask, until the model is called: that may be the making of a batch. A CPU
    device is its own host. What hardly counts is nothing.
    """
    alone, seen = told_by(ladder), ladder.seen
    if seen is None or ladder.scaling == "strong" or not (ladder.feeds or seen.followed):
        return 0.0
    if not view.has(alone) or (ladder.plan.device == "cuda" and busy_ms(ladder) is None):
        return 0.0
    step_ms, pause_ms = view.step(alone), view.pause(alone) or 0.0
    lost = min(pause_ms, step_ms if ladder.plan.device == "cpu" else idle_ms(ladder, view))
    return lost if lost > FLOOR * step_ms else 0.0


def between_ms(ladder: Ladder, view: View) -> float:
    """The same as far as every rank has it: what one does beyond that delays the others."""
    lost = paused_ms(ladder, view)
    every = view.pause(ladder.unexchanged(ladder.bare)) if ladder.devices > 1 else None
    return lost if every is None else min(lost, every)
