"""Device memory: an allocator that runs out of it, and the order of the axes of tensors in it."""

from __future__ import annotations

from itertools import zip_longest
from statistics import fmean

import numpy as np

from nfold.core.script_profile import ScriptProfile
from nfold.core.stats import Interval
from nfold.core.variant import Variant
from nfold.explain.advice import pytorch
from nfold.explain.causes.cause import Cause
from nfold.explain.causes.cost_model import Contrast, CostModel
from nfold.explain.design import ExperimentDesign, Trial, with_expandable_segments
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.estimate.samples import Samples
from nfold.explain.result.budget import MIN_STEP_FRACTION


class MemoryCause(Cause):
    """Retries of the allocator, observed in the probe run.

    An allocator without free memory returns its cached blocks and tries again: every retry waits
    for the device. The same trial with expandable segments needs no retry, unless the tensors
    themselves are too large.
    """

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        profile, refusal = design.profile, self.removal.refusal(design.plan)
        if refusal is not None:
            return refusal
        if profile is None:
            return "no run shows what more memory would gain; see peak memory in nfold bench"
        return None if profile.alloc_retries else _memory_use(profile, design.memory_bytes)

    def observed_in_probe(self, design: ExperimentDesign) -> bool:
        return Variant.expandable_segments.is_useful(design.facts)

    def contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        full, (single,) = design.actual(), self.one_device_contrasts(design)
        return (Contrast(full, with_expandable_segments(design, full), less=single),)

    def one_device_contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        one = design.one_device("real")
        return (Contrast(one, with_expandable_segments(design, one)),)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        return pytorch.reduce_allocator_retries(design.facts)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        without = with_expandable_segments(design, design.actual())
        return {pytorch.USE_EXPANDABLE_SEGMENTS: without}


class MemoryCosts(CostModel):
    """The retries on N devices; a lower bound before those of one device are measured."""

    def evidence(self, view: MetricView) -> tuple[Trial, ...]:
        own, single = self.trials, self.design.one_device("real")
        return tuple(filter(view.has, own)) if view.has(*own[:2], single) else ()

    def lost_ms(self, view: MetricView) -> Samples:
        if not self.evidence(view):
            return 0.0
        (contrast,) = self.contrasts
        if view.has(*contrast.trials):
            return contrast.cost_ms(view)
        # One device loses less than all of its step.
        on_n = view.step(contrast.trial) - view.step(contrast.base)
        return np.maximum(0.0, on_n - view.step(self.design.one_device("real")))


MEMORY = MemoryCause("memory", removal=Variant(expandable_segments=True), model=MemoryCosts)


def _memory_use(profile: ScriptProfile, size_bytes: int | None) -> str:
    none = f"no allocator retry in {profile.steps} steps"
    if profile.peak_memory_bytes is None or size_bytes is None:
        return none
    used = f"uses {profile.peak_memory_bytes / 1e9:.1f} of {size_bytes / 1e9:.1f} GB of a device"
    larger = ": the batch can grow" if 2 * profile.peak_memory_bytes < size_bytes else ""
    return f"{none}; {used}{larger}"


class LayoutCause(Cause):
    """One device with either layout. N devices lose the same, so it is a loss of one device.

    In a script, a profiler trace shows the copies that only change the layout: removing them gains
    their time. Transposes within cuDNN are only a reason to measure the other layout, because it
    may gain or lose in all other kernels, and a slow host may hide the difference.
    """

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.profile is not None:
            return "no step of the script was profiled" if design.profile.trace is None else None
        return None if design.plan.device == "cuda" else "CPU devices do not use cuDNN"

    def one_device_contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        own, copies = design.one_device(design.cheapest_input), _layout_copy_ms(design)
        if design.profile is None:
            return (Contrast(own, own.edit(layout=_other_layout(design))),)
        if not _is_transposed(design):
            real = design.one_device("real")
            return (Contrast(real, real, estimate=copies),)

        def step_and_copies(view: MetricView, trial: Trial) -> Samples:
            return copies.value + view.step(trial)

        return (Contrast(own, own.under(channels_last=True), metric=step_and_copies),)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is None:
            return f"--layout {_other_layout(design)}"
        if 2 * _layout_copy_ms(design).value < self.costs(design).one_device_ms(view):
            return pytorch.use_channels_last(design.profile)
        return pytorch.keep_memory_format(design.profile)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        if design.profile is None:
            layout = _other_layout(design)
            return {f"--layout {layout}": design.actual().edit(layout=layout)}
        if not _is_transposed(design):
            return {}
        advice = pytorch.use_channels_last(design.profile)
        return {advice: design.actual("real", channels_last=True)}


LAYOUT = LayoutCause("layout", occupies_device=True)


def _layout_copy_ms(design: ExperimentDesign) -> Interval:
    # Mean, minimum and maximum over the profiled steps. Without the copies of operators on images
    # themselves, if the other layout is measured, and without those of other operators, if no line
    # of the script changes the format: users cannot change them.
    trace = design.facts.trace
    if trace is None or not trace.layout_copy_ms:
        return Interval(0.0, 0.0, 0.0)
    operators = trace.operator_layout_copy_ms
    every = trace.layout_copy_ms if pytorch.format_changes(design.facts) else operators
    own = operators if _is_transposed(design) else ()
    pairs = zip_longest(every, own, fillvalue=0.0)
    each = [(whole - other) / design.work_divisor for whole, other in pairs] or [0.0]
    return Interval(fmean(each), min(each), max(each))


def _is_transposed(design: ExperimentDesign) -> bool:
    # Whether the transposes around a script's convolutions take a noticeable part of a step.
    trace = design.facts.trace
    if trace is None or design.facts.channels_last or not design.facts.convolutions:
        return False
    transposes_ms = trace.cudnn_transpose_ms + fmean(trace.operator_layout_copy_ms or (0.0,))
    return transposes_ms > MIN_STEP_FRACTION * (trace.device_busy_ms or design.step_ms or 0.0)


def _other_layout(design: ExperimentDesign) -> str:
    return "channels_first" if design.plan.layout == "channels_last" else "channels_last"
