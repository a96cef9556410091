"""C10: every device trains on the same samples. Seen by the hashes of what each rank was fed."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.rung import Trial
from nfold.explain.view import MetricView

SAME_SAMPLES = "same_samples"
"""The doubt that a measurement carries where it is so."""


class UndividedWorkCause(Cause):
    """N devices make the same step N times: exactly N times the work."""

    id: ClassVar[str] = "undivided-work"

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """The real run, whose doubts tell."""
        return (design.actual(),)

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """All steps but one that distinct samples would need."""
        return (design.devices - 1) * view.step(design.actual())

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        """Words."""
        if design.profile is not None:
            return lines.divide_samples(design.profile)
        return "give every rank its own samples: DistributedSampler, or run.loader"
