"""Work that grows with the number of devices: every rank computes for the samples of all ranks."""

from __future__ import annotations

from nfold.explain.advice.pytorch import at_location
from nfold.explain.causes.cause import ONE_PROCESS, Cause
from nfold.explain.causes.collectives import repeats_gathered_work, wrapper_contrast
from nfold.explain.causes.cost_model import Contrast
from nfold.explain.design import ExperimentDesign
from nfold.explain.estimate.bootstrap import MetricView


class GrowingWorkCause(Cause):
    """Products of gathered tensors, such as the scores of all pairs.

    Ranks that do not communicate still make them at their full size; replicas do not.
    """

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.uses_one_process:
            return ONE_PROCESS
        repeats = repeats_gathered_work(design.facts)
        return None if repeats else "no rank computes on samples gathered from all ranks"

    def contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        return (wrapper_contrast(design, ""),)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        return at_location(
            design.facts.most_frequent_line("gathered_work"),
            "compute it for the rank's own samples against those of all ranks, gathered by "
            "torch.distributed.nn.functional.all_gather, which returns their gradients; here all "
            f"{design.devices} ranks compute it for all samples",
        )

    def has_repair(self, design: ExperimentDesign) -> bool:
        return True


GROWING_WORK = GrowingWorkCause("growing-work", affects_one_device=False)
