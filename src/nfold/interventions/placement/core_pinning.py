"""Let a rank run on all cores."""

from __future__ import annotations

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention, WorkloadFacts


class CorePinning(Intervention[bool]):
    """A rank is bound to its own cores."""

    default = True
    applied_in = ("engines/torch/framework.py", "instrument/rank_environment.py")

    def torch_refusal(self, value: bool, plan: Plan, workload: WorkloadFacts) -> str | None:
        return None if plan.device == "cpu" else "only CPU devices are bound to cores"
