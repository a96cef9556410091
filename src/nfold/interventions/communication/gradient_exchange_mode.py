"""Exchange no gradients, one element of each bucket, or half of the bytes."""

from __future__ import annotations

from typing import Literal

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention, WorkloadFacts


class GradientExchangeMode(Intervention[Literal["real", "none", "barrier", "half"]]):
    """The gradients that ranks exchange after backward.

    All of them (``real``), nothing (``none``), one element per bucket in the same order
    (``barrier``), or half of the bytes of DistributedDataParallel (``half``).
    """

    default = "real"
    labels = {"none": "no all-reduce", "barrier": "barrier only", "half": "half the gradient bytes"}
    switchable = True
    changes_communication = True
    applied_in = (
        "engines/torch/communication/gradient_exchange.py",
        "instrument/hooks/distributed_hooks.py",
    )

    def refusal(self, value: str, plan: Plan) -> str | None:
        if plan.devices == 1:
            return "one device exchanges no gradients"
        if plan.strategy == "dp":
            return "nn.DataParallel adds gradients up inside its one process"
        if value == "half" and plan.strategy != "ddp":
            return "only DistributedDataParallel has a hook that sends half"
        return None

    def torch_refusal(self, value: str, plan: Plan, workload: WorkloadFacts) -> str | None:
        if value == "half" and not workload.is_script:
            return "the plan sets the type of exchanged gradients"
        return None

    def switchable_in_workload(self, plan: Plan) -> bool:
        return True
