"""The part of a script's step in which its device has nothing to do, and what its host does then.

Of one device alone with the input that costs least, whose host waits for no value: there the host's
pause between two steps holds no waiting for the device.
"""

from __future__ import annotations

from nfold.explain.ladder import ExperimentDesign
from nfold.explain.rung import Trial
from nfold.explain.view import MetricView
from nfold.finding import MIN_STEP_FRACTION

HOST_AHEAD_FRACTION = 0.5
"""Of a step: a host that is further ahead when a window of several ends is not waited for."""


def idle_trial(design: ExperimentDesign) -> Trial:
    """That run."""
    return design.with_expandable_segments(design.no_host_sync)


def device_busy_ms(design: ExperimentDesign) -> float | None:
    """Of a step, as a trace has seen it on a GPU."""
    traced = design.profile.trace if design.profile is not None else None
    return None if traced is None else traced.device_busy_ms


def device_idle_ms(design: ExperimentDesign, view: MetricView) -> float:
    """In which a GPU waits for its host."""
    alone = idle_trial(design)
    step_ms, ahead_ms = view.step(alone), view.host_ahead(alone)
    if ahead_ms is None or ahead_ms > HOST_AHEAD_FRACTION * step_ms:
        return 0.0
    return max(0.0, step_ms - (device_busy_ms(design) or 0.0))


def host_gap_ms(design: ExperimentDesign, view: MetricView) -> float:
    """Of these, in which the host has neither asked for the next batch yet nor begun its step.

    Where nobody is seen to ask, until the model is called: that may be the making of a batch. A CPU
    device is its own host. What hardly counts is nothing.
    """
    alone, seen = idle_trial(design), design.profile
    if (
        seen is None
        or design.scaling == "strong"
        or not (design.can_replay_input or seen.model_calls_hooked)
    ):
        return 0.0
    if not view.has(alone) or (design.plan.device == "cuda" and device_busy_ms(design) is None):
        return 0.0
    step_ms, pause_ms = view.step(alone), view.host_gap(alone) or 0.0
    lost = min(pause_ms, step_ms if design.plan.device == "cpu" else device_idle_ms(design, view))
    return lost if lost > MIN_STEP_FRACTION * step_ms else 0.0


def shared_host_gap_ms(design: ExperimentDesign, view: MetricView) -> float:
    """The same as far as every rank has it: what one does beyond that delays the others."""
    lost = host_gap_ms(design, view)
    every = (
        view.host_gap(design.no_allreduce(design.cheapest_input)) if design.devices > 1 else None
    )
    return lost if every is None else min(lost, every)
