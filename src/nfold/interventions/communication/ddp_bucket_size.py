"""Exchange gradients in larger or smaller buckets."""

from __future__ import annotations

from typing import Any

from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.interventions.communication.ddp_remedy import DdpRemedy

MIB = 1 << 20


class DdpBucketSize(DdpRemedy[int | None]):
    """MiB of gradients in one all-reduce of DistributedDataParallel; None: as the script says.

    Small buckets begin earlier in the backward, large ones use the full bandwidth.
    """

    default = None
    numerics = "rounding"  # where a bucket is divided decides in which order ranks are added
    refused_in_workloads = "workloads choose the sizes of their buckets"

    def check(self, value: int | None) -> None:
        if value is not None and value < 1:
            raise UsageError(f"{self.name} {value}: allowed are whole numbers from 1")

    def label(self, value: int | None) -> str:
        return f"bucket_cap_mb={value}"

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.parallel == "ddp" and sum(profile.bucket_bytes) > MIB)

    def values_to_try(self, profile: Any, plan: Plan, cores: int) -> tuple[int, ...]:
        return (100, 1) if len(profile.bucket_bytes) > 1 else (1,)

    def ddp_arguments(self, value: int | None) -> dict[str, Any]:
        return {"bucket_cap_mb": value}
