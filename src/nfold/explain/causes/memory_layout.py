"""C12: transposes around convolutions: one device with either order of axes.

Of a script, copies that only change the order are seen in a trace: without them so much is won.
Transposes of cuDNN's own are only a reason to try: what the other order wins or loses in all other
kernels, and what of it a slow host hides, is measured.
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
    """The same on one device as on N, so a loss of one device's own."""

    id: ClassVar[str] = "layout"
    occupies_device: ClassVar[bool] = True

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.profile is not None:
            return "no step of the script was traced" if design.profile.trace is None else None
        return None if design.plan.device == "cuda" else "CPU devices transpose nothing for cuDNN"

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        mine = design.one_device(design.cheapest_input)
        if design.profile is None:
            return (mine, design.one_device(design.cheapest_input, layout=other_layout(design)))
        if _is_transposed(design):
            return (mine, design.one_device_with(design.cheapest_input, channels_last=True))
        return (design.one_device("real"),)

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        told = self.direct_estimate(design)
        if told is not None:
            return told.value
        mine, others = (view.step(rung) for rung in self.one_device_trials(design))
        return self._reordering_ms(design).value + mine - others

    def direct_estimate(self, design: ExperimentDesign) -> Interval | None:
        alone = design.profile is not None and not _is_transposed(design)
        return self._reordering_ms(design) if alone else None

    def _reordering_ms(self, design: ExperimentDesign) -> Interval:
        """In a script's copies: the mean over traced steps, and the least and most of any.

        Not in those of operators on images themselves, where the other layout is tried.
        """
        traced = design.profile.trace if design.profile is not None else None
        if traced is None:
            return Interval(0.0, 0.0, 0.0)
        own = traced.operator_layout_copy_ms if _is_transposed(design) else ()
        pairs = zip_longest(traced.layout_copy_ms, own, fillvalue=0.0)
        each = [(every - theirs) / design.work_divisor for every, theirs in pairs]
        return Interval(fmean(each), min(each), max(each)) if each else Interval(0.0, 0.0, 0.0)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is None:
            return f"--layout {other_layout(design)}"
        copied = self._reordering_ms(design).value
        if 2 * copied < self.one_device_ms(design, view):
            return pytorch.use_channels_last(design.profile)
        return pytorch.keep_memory_format(design.profile)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        if design.profile is None:
            return {
                f"--layout {other_layout(design)}": design.with_plan(layout=other_layout(design))
            }
        if not _is_transposed(design):
            return {}
        return {
            pytorch.use_channels_last(design.profile): design.actual("real", channels_last=True)
        }


def _is_transposed(design: ExperimentDesign) -> bool:
    """Whether what a script's convolutions compute, and what follows them, is transposed for them,
    and not a little.
    """
    seen = design.profile
    if seen is None or seen.trace is None or seen.channels_last or not seen.convolutions:
        return False
    traced = seen.trace
    theirs = traced.cudnn_transpose_ms + fmean(traced.operator_layout_copy_ms or (0.0,))
    return theirs > MIN_STEP_FRACTION * (traced.device_busy_ms or design.step_ms or 0.0)


def other_layout(design: ExperimentDesign) -> str:
    """The layout that the plan has not."""
    return "channels_first" if design.plan.layout == "channels_last" else "channels_last"
