"""Let DistributedDataParallel rely on the same graph in every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nfold.core.plan import Plan
from nfold.interventions.communication.ddp_remedy import DdpRemedy


class DdpStaticGraph(DdpRemedy[bool]):
    """Every step has the same graph: unused parameters are searched for in the first one only.

    DistributedDataParallel raises RuntimeError in a step with another graph. Activation
    checkpointing is allowed.
    """

    default = False
    labels = {True: "static_graph=True"}
    numerics = "rounding"  # in place of a search for unused parameters, buckets are built anew
    refused_in_workloads = "workloads have no unused parameters to search for"

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if reason := super().refusal(value, plan):
            return reason
        if plan.accumulate > 1:
            return "a static graph cannot be combined with no_sync() of accumulated batches"
        return None

    def conflict(self, value: bool, interventions: Mapping[str, object]) -> str | None:
        if "find_unused_parameters" in interventions:
            return "a static graph searches for unused parameters in its first step"
        return None

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.parallel == "ddp" and profile.accumulation == 1)

    def ddp_arguments(self, value: bool) -> dict[str, Any]:
        return {"static_graph": True}
