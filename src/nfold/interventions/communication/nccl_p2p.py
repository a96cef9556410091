"""Let GPUs communicate through host memory instead of directly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention


class NcclP2p(Intervention[bool]):
    """NCCL copies directly between GPUs that can access each other's memory."""

    default = True
    labels = {False: "NCCL_P2P_DISABLE=1"}
    kind = "remedy"
    numerics = "rounding"  # NCCL may choose another algorithm, which adds in another order

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if plan.device == "cpu":
            return "CPU devices communicate with gloo, not with NCCL"
        if plan.devices == 1:
            return "one device communicates with no other"
        if plan.strategy == "dp":
            return "nn.DataParallel copies within its one process"
        return None

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.backend == "nccl")

    def environment(self, value: bool, environment: Mapping[str, str]) -> dict[str, str]:
        return {"NCCL_P2P_DISABLE": "1"}
