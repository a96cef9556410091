"""C11: work per step that does not shrink with the batch: launches, and kernels left half empty."""

from __future__ import annotations

import functools
from typing import ClassVar, Literal

from nfold.core.script_profile import ScriptProfile
from nfold.core.variant import Variant
from nfold.explain.advice import pytorch
from nfold.explain.causes.cause import Cause
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.result.budget import MIN_STEP_FRACTION

COMPILE_MODES: tuple[Literal["default", "reduce-overhead"], ...] = ("reduce-overhead", "default")
"""In which a script's model is compiled to try whether that helps: as CUDA graphs, or without."""


class LaunchBoundCause(Cause):
    """A device with its share of the batch, against an N-th of the whole batch on one."""

    id: ClassVar[str] = "launch-bound"

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.scaling == "strong" or _can_capture(design):
            return None
        if design.profile is None or design.profile.device == "cpu":
            if design.devices == 1:
                return "one device has no other share of the batch"
            return "the batch of a device does not shrink with their number"
        if device_busy_ms(design) is None:
            return "no step of the script was traced"
        return None

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        return () if design.scaling == "weak" else (design.one_device("real"), design.baseline)

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        share = view.step(design.one_device("real"))
        return share - view.step(design.baseline) / design.devices

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Eager launches against one graph, where there are graphs; else two batches.

        A script's are told by the time in which its GPU was busy, where neither host
        nor allocator waits for it.
        """
        if _can_capture(design):
            return (design.one_device(design.cheapest_input), _captured_trial(design))
        return (idle_trial(design),) if _uses_trace(design) else self.trials(design)

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """What a graph saves; else the part of the step that a line gives batch 0.

        Of a script, the time in which its GPU has nothing to do, unless its host is ahead of it or
        does something else.
        """
        if _uses_trace(design):
            return device_idle_ms(design, view) - host_gap_ms(design, view)
        if _can_capture(design):
            return view.step(design.one_device(design.cheapest_input)) - view.step(
                _captured_trial(design)
            )
        n, share, whole = (
            design.devices,
            view.step(design.one_device("real")),
            view.step(design.baseline),
        )
        return (n * share - whole) / (n - 1)

    def floor_ms(self, design: ExperimentDesign) -> float:
        return (device_busy_ms(design) or 0.0) if _uses_trace(design) else 0.0

    def total_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        return max(0.0, *self.loss_components_ms(design, view))

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is not None:
            return _larger_batch_advice(design.profile, _compiled_trials(design), view)
        captured = " or --step captured" if _can_capture(design) else ""
        return f"more work per step: a larger --batch{captured}"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        seen = design.profile
        if seen is not None:
            return {
                pytorch.compile_model(seen, mode): rung
                for mode, rung in _compiled_trials(design).items()
            }
        if not _can_capture(design):
            return {}
        if design.devices == 1:
            return {"--step captured": design.with_plan(step="captured")}
        strategy = "dp" if design.uses_one_process else "nfold"
        changes = {"step": "captured", "strategy": strategy}
        return {"--step captured --strategy nfold": design.with_plan(**changes)}


def _compiled_trials(design: ExperimentDesign) -> dict[str, Trial]:
    seen = design.profile
    if seen is None or seen.compiled or design.plan.device != "cuda" or design.single_device_script:
        return {}
    if seen.parallel in ("dp", "fsdp"):
        return {}
    return {mode: design.actual("real", compiled=mode) for mode in COMPILE_MODES}


def _larger_batch_advice(profile: ScriptProfile, modes: dict[str, Trial], view: MetricView) -> str:
    """Fewer launches a sample; what was tried and not found better is not advised.

    Where GradScaler reads a value in every step, its host is never ahead of the device.
    """
    tried = [mode for mode, rung in modes.items() if view.has(rung)]
    also = f", or {pytorch.compile_model(profile, COMPILE_MODES[0])}" if modes else ""
    if tried:
        also = f" (torch.compile, {' and '.join(tried)}: no gain beyond the noise)"
    elif any(rung in view.failed_trials for rung in modes.values()):
        also = " (torch.compile was tried, and failed)"
    if profile.host_syncs >= 1 and profile.autocast == "fp16":
        also += ", or bf16, which needs no GradScaler: that waits for the device in every step"
    return pytorch.increase_batch(profile, also)


def _can_capture(design: ExperimentDesign) -> bool:
    if design.profile is not None or design.is_operation:
        return False
    eager = "captured" not in str(design.plan.step) and design.plan.precision != "fp16"
    return design.plan.device == "cuda" and eager


def _uses_trace(design: ExperimentDesign) -> bool:
    return design.scaling == "weak" and device_busy_ms(design) is not None


def _captured_trial(design: ExperimentDesign) -> Trial:
    return _with_capture(design.one_device(design.cheapest_input))


@functools.cache
def _with_capture(trial: Trial) -> Trial:
    return Trial(plan=trial.plan, variant=trial.variant.merge(Variant(captured=True)))


# The part of a script's step in which its device has nothing to do, and what its host does then.
#
# Of one device alone with the input that costs least, whose host waits for no value: there the host's
# pause between two steps holds no waiting for the device.

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
