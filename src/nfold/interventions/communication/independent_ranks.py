"""Let every device train by itself, all at the same time."""

from __future__ import annotations

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention


class IndependentRanks(Intervention[bool]):
    """Every device trains by itself, all at the same time."""

    default = False
    labels = {True: "replicas"}
    applied_in = ("engines/torch/variant_support.py", "instrument/rank_environment.py")

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if plan.devices == 1:
            return "one device has no other to be independent of"
        return "nn.DataParallel has one process" if plan.strategy == "dp" else None
