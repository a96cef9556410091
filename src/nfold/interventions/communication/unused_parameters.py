"""Do not look for parameters without a gradient."""

from __future__ import annotations

from typing import Any

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention


class UnusedParameterSearch(Intervention[bool]):
    """DistributedDataParallel looks for parameters without a gradient if the script asks for it."""

    default = True
    stored_name = "unused_parameters"
    labels = {False: "find_unused_parameters=False"}
    kind = "remedy"
    numerics = "same"
    needed_in_run = "DistributedDataParallel"
    refused_in_workloads = "every parameter has a gradient: there is no search"

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if plan.devices == 1 or plan.strategy != "ddp":
            return "only DistributedDataParallel looks for parameters without a gradient"
        return None

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.find_unused_parameters)

    def ddp_arguments(self, value: bool) -> dict[str, Any]:
        return {"find_unused_parameters": False}
