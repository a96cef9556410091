"""Memory layout: transposes around convolutions, which another order of axes avoids.

In a script, a profiler trace shows the copies that only change the layout: removing them gains their
time. Transposes within cuDNN are only a reason to measure the other layout, because it may gain or
lose in all other kernels, and a slow host may hide the difference.
"""

from __future__ import annotations

from itertools import zip_longest
from statistics import fmean
from typing import ClassVar

from nfold.core.stats import Interval
from nfold.explain.advice import pytorch
from nfold.explain.causes.cause import Cause
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.result.budget import MIN_STEP_FRACTION


class LayoutCause(Cause):
    """One device with either layout. N devices lose the same, so it is a loss of one device."""

    id: ClassVar[str] = "layout"
    occupies_device: ClassVar[bool] = True

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.profile is not None:
            return "no step of the script was profiled" if design.profile.trace is None else None
        return None if design.plan.device == "cuda" else "CPU devices do not use cuDNN"

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        own = design.one_device(design.cheapest_input)
        if design.profile is None:
            return (own, design.one_device(design.cheapest_input, layout=other_layout(design)))
        if _is_transposed(design):
            return (own, design.one_device_with(design.cheapest_input, channels_last=True))
        return (design.one_device("real"),)

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        estimate = self.direct_estimate(design)
        if estimate is not None:
            return estimate.value
        own, other = map(view.step, self.one_device_trials(design))
        return self._layout_copy_ms(design).value + own - other

    def direct_estimate(self, design: ExperimentDesign) -> Interval | None:
        if design.profile is None or _is_transposed(design):
            return None
        return self._layout_copy_ms(design)

    def _layout_copy_ms(self, design: ExperimentDesign) -> Interval:
        # Mean, minimum and maximum over the profiled steps. Without the copies of operators on
        # images themselves, if the other layout is measured.
        trace = design.profile.trace if design.profile is not None else None
        if trace is None:
            return Interval(0.0, 0.0, 0.0)
        own = trace.operator_layout_copy_ms if _is_transposed(design) else ()
        pairs = zip_longest(trace.layout_copy_ms, own, fillvalue=0.0)
        each = [(every - operators) / design.work_divisor for every, operators in pairs]
        return Interval(fmean(each), min(each), max(each)) if each else Interval(0.0, 0.0, 0.0)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is None:
            return f"--layout {other_layout(design)}"
        if 2 * self._layout_copy_ms(design).value < self.one_device_ms(design, view):
            return pytorch.use_channels_last(design.profile)
        return pytorch.keep_memory_format(design.profile)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        if design.profile is None:
            layout = other_layout(design)
            return {f"--layout {layout}": design.with_plan(layout=layout)}
        if not _is_transposed(design):
            return {}
        advice = pytorch.use_channels_last(design.profile)
        return {advice: design.actual("real", channels_last=True)}


def _is_transposed(design: ExperimentDesign) -> bool:
    # Whether the transposes around a script's convolutions take a noticeable part of a step.
    profile = design.profile
    if (
        profile is None
        or profile.trace is None
        or profile.channels_last
        or not profile.convolutions
    ):
        return False
    trace = profile.trace
    transposes_ms = trace.cudnn_transpose_ms + fmean(trace.operator_layout_copy_ms or (0.0,))
    return transposes_ms > MIN_STEP_FRACTION * (trace.device_busy_ms or design.step_ms or 0.0)


def other_layout(design: ExperimentDesign) -> str:
    """Return the layout that the plan does not have."""
    return "channels_first" if design.plan.layout == "channels_last" else "channels_last"
