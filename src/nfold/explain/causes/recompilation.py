"""Code that torch.compile compiles again in every step."""

from __future__ import annotations

from math import inf

from nfold.core.stats import Interval
from nfold.explain.advice.pytorch import at_location
from nfold.explain.causes.cause import Cause
from nfold.explain.causes.cost_model import Contrast
from nfold.explain.design import ExperimentDesign
from nfold.explain.estimate.bootstrap import MetricView

MAX_FRACTION = 0.95  # of the step of the probe run
SHAPE_GUARDS = ("size", "shape", "stride")


class RecompilationCause(Cause):
    """The time that the compiler itself reports. N devices lose the same as one."""

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        found = design.facts.recompilation
        return "no code is compiled again in every step" if found is None else None

    def one_device_contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        found, one = design.facts.recompilation, design.one_device("real")
        if found is None:
            return ()
        # The compiler's clocks overlap, so that their sum may be longer than the step.
        most = inf if design.step_ms is None else MAX_FRACTION * design.step_ms
        return (Contrast(one, one, estimate=Interval(*(min(ms, most) for ms in found.step_ms))),)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        found = design.facts.recompilation
        assert found is not None
        change = "pass changing numbers as tensors, or torch.compile(..., dynamic=True)"
        if any(word in found.guard for word in SHAPE_GUARDS):
            change = "keep shapes fixed (padding, drop_last=True), or torch._dynamo.mark_dynamic()"
        why = f" because {found.guard} holds for one step only" if found.guard else ""
        text = f"{change}: {found.function} is compiled again in every step{why}"
        return at_location(found.location, text)


RECOMPILATION = RecompilationCause("recompilation")
