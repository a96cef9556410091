"""The base class of interventions that set an environment variable of NCCL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention

T = TypeVar("T")


class NcclVariable(Intervention[T]):
    """An environment variable that NCCL reads when the first process group is created."""

    kind = "remedy"
    numerics = "rounding"  # another transport or algorithm may add ranks in another order
    variable: ClassVar[str]

    def refusal(self, value: T, plan: Plan) -> str | None:
        if plan.device == "cpu":
            return "CPU devices communicate with gloo, not with NCCL"
        if plan.devices == 1:
            return "one device communicates with no other"
        if plan.strategy == "dp":
            return "nn.DataParallel copies within its one process"
        return None

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.backend == "nccl")

    def setting(self, value: T) -> str:
        """Return the text of the variable."""
        return str(value)

    def label(self, value: T) -> str:
        return f"{self.variable}={self.setting(value)}"

    def environment(self, value: T, environment: Mapping[str, str]) -> dict[str, str]:
        return {self.variable: self.setting(value)}
