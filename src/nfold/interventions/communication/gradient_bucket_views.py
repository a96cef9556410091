"""Let gradients be views of the buckets that DistributedDataParallel communicates."""

from __future__ import annotations

from typing import Any

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention


class GradientBucketViews(Intervention[bool]):
    """Gradients are views of buckets, which saves their memory and a copy in each step."""

    default = False
    labels = {True: "gradient_as_bucket_view=True"}
    kind = "remedy"
    numerics = "same"
    needed_in_run = "DistributedDataParallel"
    refused_in_workloads = "workloads set gradient_as_bucket_view already"

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if plan.devices == 1 or plan.strategy != "ddp":
            return "only DistributedDataParallel has buckets"
        return None

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.parallel == "ddp")

    def ddp_arguments(self, value: bool) -> dict[str, Any]:
        return {"gradient_as_bucket_view": True}
