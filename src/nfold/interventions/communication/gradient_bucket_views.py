"""Let gradients be views of the buckets that DistributedDataParallel communicates."""

from __future__ import annotations

from typing import Any

from nfold.interventions.communication.ddp_remedy import DdpRemedy


class GradientBucketViews(DdpRemedy[bool]):
    """Gradients are views of buckets, which saves their memory and a copy in each step."""

    default = False
    labels = {True: "gradient_as_bucket_view=True"}
    numerics = "same"
    refused_in_workloads = "workloads set gradient_as_bucket_view already"

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.parallel == "ddp")

    def ddp_arguments(self, value: bool) -> dict[str, Any]:
        return {"gradient_as_bucket_view": True}
