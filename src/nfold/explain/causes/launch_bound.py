"""Launch-bound steps: work that does not shrink with the batch (launches, half-empty kernels)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from nfold.core.script_profile import ScriptProfile
from nfold.explain.advice import pytorch
from nfold.explain.causes.cause import Cause
from nfold.explain.causes.collectives import without_host_syncs
from nfold.explain.causes.cost_model import Contrast, CostModel
from nfold.explain.design import ExperimentDesign, Trial, no_allreduce, with_expandable_segments
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.estimate.samples import Samples
from nfold.explain.result.budget import MIN_STEP_FRACTION

# The modes of torch.compile to try: with CUDA graphs, and without.
COMPILE_MODES: tuple[Literal["default", "reduce-overhead"], ...] = ("reduce-overhead", "default")
HOST_AHEAD_FRACTION = 0.5  # of a step: a host that is further ahead is not waited for


class LaunchBoundCause(Cause):
    """A device with its share of the batch, against an N-th of one device with the whole batch."""

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.scaling == "strong" or _can_capture(design):
            return None
        if design.profile is None or design.profile.device == "cpu":
            if design.devices == 1:
                return "one device always has the whole batch"
            return "with weak scaling, the batch of a device does not shrink"
        if device_busy_ms(design) is None:
            return "no step of the script was profiled"
        return None

    def contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        if design.scaling == "weak":
            return ()

        def share(view: MetricView, whole: Trial) -> Samples:
            return view.step(whole) / design.devices

        return (Contrast(design.one_device("real"), design.baseline, base_metric=share),)

    def one_device_contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        if not _can_capture(design):
            return ()
        own = design.one_device(design.cheapest_input)
        return (Contrast(own, own.under(captured=True)),)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is not None:
            return _larger_batch_advice(design, design.profile, view)
        captured = " or --step captured" if _can_capture(design) else ""
        return f"more work per step: a larger --batch{captured}"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        profile = design.profile
        if profile is not None:
            return {
                pytorch.compile_model(profile, mode): trial
                for mode, trial in _compiled_trials(design).items()
            }
        if not _can_capture(design):
            return {}
        captured = design.actual().edit(step="captured")
        if design.devices == 1:
            return {"--step captured": captured}
        strategy = "dp" if design.uses_one_process else "nfold"
        return {"--step captured --strategy nfold": captured.edit(strategy=strategy)}


class LaunchCosts(CostModel):
    """The idle time of a device whose host launches too slowly.

    A profile of a script shows its GPU's busy time, in the trial whose host never waits. Else eager
    launches are compared with a CUDA graph, or two batch sizes.
    """

    @property
    def one_device_trials(self) -> tuple[Trial, ...]:
        if _uses_trace(self.design):
            return (idle_trial(self.design),)
        return super().one_device_trials or self.trials

    def one_device_ms(self, view: MetricView) -> Samples:
        design = self.design
        if _uses_trace(design):
            return device_idle_ms(design, view) - host_gap_ms(design, view)
        if self.one_device_contrasts:
            return super().one_device_ms(view)
        # The intercept at batch 0 of the line through both batch sizes.
        share, whole = view.step(design.one_device("real")), view.step(design.baseline)
        return (design.devices * share - whole) / (design.devices - 1)

    def floor_ms(self) -> float:
        return (device_busy_ms(self.design) or 0.0) if _uses_trace(self.design) else 0.0


MIN_UNCERTAIN_GAIN = 1.05
"""Times as fast: a smaller gain that is not beyond the noise is none."""
LAUNCH_BOUND = LaunchBoundCause("launch-bound", same_loss=True, model=LaunchCosts)


def _compiled_trials(design: ExperimentDesign) -> dict[str, Trial]:
    facts, on_gpu = design.facts, design.plan.device == "cuda"
    if not on_gpu or facts.compiled or facts.parallel in ("dp", "fsdp"):
        return {}
    if design.single_device_script:
        return {}
    return {mode: design.actual("real", compiled=mode) for mode in COMPILE_MODES}


def _larger_batch_advice(design: ExperimentDesign, profile: ScriptProfile, view: MetricView) -> str:
    modes = _compiled_trials(design)
    tried = [
        f"{mode}: {_uncertain_gain(view, design.actual(), trial)}"
        for mode, trial in modes.items()
        if view.has(trial, design.actual())
    ]
    also = " (torch.compile was not measured)" if modes else ""
    if tried:
        also = f" (torch.compile, {' and '.join(tried)})"
    elif any(trial in view.failed_trials for trial in modes.values()):
        also = " (torch.compile failed)"
    if profile.host_syncs >= 1 and profile.autocast == "fp16":
        also += ", or bf16 without GradScaler, which waits for the device in every step"
    return pytorch.increase_batch(profile, also)


def _uncertain_gain(view: MetricView, now: Trial, changed: Trial) -> str:
    factor = float(view.step(now) / view.step(changed))
    return f"{factor:.2f}x, within the noise" if factor > MIN_UNCERTAIN_GAIN else "no gain"


def _can_capture(design: ExperimentDesign) -> bool:
    if design.profile is not None or design.is_operation:
        return False
    eager = "captured" not in str(design.plan.step) and design.plan.precision != "fp16"
    return design.plan.device == "cuda" and eager


def _uses_trace(design: ExperimentDesign) -> bool:
    return design.scaling == "weak" and device_busy_ms(design) is not None


# The device idle time of a script, and the host gaps in it. They are measured on one device alone
# with the cheapest input, whose host reads no values: there a host gap contains no wait for the device.


def idle_trial(design: ExperimentDesign) -> Trial:
    """Return the trial that shows device idle time and host gaps."""
    return with_expandable_segments(design, without_host_syncs(design))


def device_busy_ms(design: ExperimentDesign) -> float | None:
    """Return the GPU busy time per step in the profiler trace, None without a trace."""
    trace = design.facts.trace
    return None if trace is None else trace.device_busy_ms


def device_idle_ms(design: ExperimentDesign, view: MetricView) -> Samples:
    """Return the milliseconds per step in which a GPU waits for its host."""
    trial = idle_trial(design)
    step_ms, ahead_ms = view.step(trial), view.metric(trial, "ahead")
    if ahead_ms is None:
        return 0.0
    idle_ms = np.maximum(0.0, step_ms - (device_busy_ms(design) or 0.0))
    return np.where(ahead_ms > HOST_AHEAD_FRACTION * step_ms, 0.0, idle_ms)


def host_gap_ms(design: ExperimentDesign, view: MetricView) -> Samples:
    """Return the host gap per step: the host has not requested the next batch nor begun the step.

    If no batch request is observed, the gap ends when the model is called, and may include making
    a batch. On a CPU device, whose host waits for no device, the gap is not limited to idle time, and
    is taken from real input if replayed batches were not measured. Small gaps are 0.
    """
    trial, profile = idle_trial(design), design.profile
    if design.plan.device == "cpu" and not view.has(trial):
        trial = design.one_device("real")
    if (
        profile is None
        or design.scaling == "strong"
        or not (design.can_replay_input or profile.model_calls_hooked)
    ):
        return 0.0
    if not view.has(trial) or (design.plan.device == "cuda" and device_busy_ms(design) is None):
        return 0.0
    step_ms, gap_ms = view.step(trial), view.metric(trial, "host_gap")
    if gap_ms is None:
        return 0.0
    limit_ms = step_ms if design.plan.device == "cpu" else device_idle_ms(design, view)
    lost = np.minimum(gap_ms, limit_ms)
    return np.where(lost > MIN_STEP_FRACTION * step_ms, lost, 0.0)


def shared_host_gap_ms(design: ExperimentDesign, view: MetricView) -> Samples:
    """Return the host gap that every rank has: a longer gap of one rank delays the others.

    It is the same trial's in all resamples: the smaller of two noisy gaps would be too small.
    """
    lost = host_gap_ms(design, view)
    if design.devices == 1:
        return lost
    shared = view.metric(no_allreduce(design, design.cheapest_input), "host_gap")
    return lost if shared is None or np.mean(lost) <= np.mean(shared) else shared
