"""Fix the algorithm of NCCL's all-reduce."""

from __future__ import annotations

from typing import Any, Literal

from nfold.core.plan import Plan
from nfold.interventions.communication.nccl_variable import NcclVariable

Algorithm = Literal["", "Ring", "Tree"]


class NcclAlgorithm(NcclVariable[Algorithm]):
    """The algorithm of NCCL's all-reduces; empty: NCCL chooses it by the size of the message."""

    default = ""
    variable = "NCCL_ALGO"

    def values_to_try(self, profile: Any, plan: Plan, cores: int) -> tuple[Algorithm, ...]:
        return ("Ring", "Tree")

    def setting(self, value: str) -> str:
        # From NCCL 2.24 on, other collectives fail if all algorithms that they have are excluded.
        return f"allreduce:{value.lower()}"
