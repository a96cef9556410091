"""Do not look for parameters without a gradient."""

from __future__ import annotations

from typing import Any

from nfold.interventions.communication.ddp_remedy import DdpRemedy


class UnusedParameterSearch(DdpRemedy[bool]):
    """DistributedDataParallel looks for parameters without a gradient if the script asks for it."""

    default = True
    stored_name = "unused_parameters"
    labels = {False: "find_unused_parameters=False"}
    numerics = "same"
    refused_in_workloads = "every parameter has a gradient: there is no search"

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.find_unused_parameters)

    def ddp_arguments(self, value: bool) -> dict[str, Any]:
        return {"find_unused_parameters": False}
