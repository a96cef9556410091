"""Let the allocator of a GPU grow its segments in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention

# the first that is set counts
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments"


class ExpandableSegments(Intervention[bool]):
    """The allocator of a GPU grows its segments in place."""

    default = False
    labels = {True: "expandable segments"}
    kind = "remedy"
    numerics = "same"
    refused_in_workloads = "workloads use PyTorch's default allocator"

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if plan.device == "cpu":
            return "CPU devices use the system's memory, which has no segments"
        return None

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.alloc_retries > 0)

    def environment(self, value: bool, environment: Mapping[str, str]) -> dict[str, str]:
        name = next((v for v in ALLOCATOR_VARIABLES if v in environment), ALLOCATOR_VARIABLES[0])
        settings = [setting.strip() for setting in environment.get(name, "").split(",")]
        others = [setting for setting in settings if setting and not setting.startswith(EXPANDABLE)]
        return {name: ",".join([*others, f"{EXPANDABLE}:True"])}

    def simulated_ms(self, value: bool, scenario: Any, devices: int) -> float:
        if value:
            return 0.0
        return float(scenario.retries_ms + scenario.neighbor_retries_ms * (devices - 1))
