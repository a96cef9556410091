"""Exchange no gradients, or one element of each bucket."""

from __future__ import annotations

from typing import Literal

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention


class GradientExchangeMode(Intervention[Literal["real", "none", "barrier"]]):
    """The gradients that ranks exchange after backward.

    All of them (``real``), nothing (``none``), or one element per bucket in the same order
    (``barrier``).
    """

    default = "real"
    labels = {"none": "no all-reduce", "barrier": "barrier only"}
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
        return None

    def switchable_in_workload(self, plan: Plan) -> bool:
        return True
