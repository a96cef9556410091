"""Replay the step as a CUDA graph."""

from __future__ import annotations

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention, WorkloadFacts


class CudaGraphStep(Intervention[bool]):
    """The step is replayed as a CUDA graph."""

    default = False
    labels = {True: "CUDA graph"}
    kind = "remedy"
    numerics = "same"

    def refusal(self, value: bool, plan: Plan) -> str | None:
        return "the step is captured already" if "captured" in str(plan.step) else None

    def torch_refusal(self, value: bool, plan: Plan, workload: WorkloadFacts) -> str | None:
        if workload.is_script:
            return f"the step of {workload.name} belongs to the script: it is not captured"
        if plan.device == "cpu":
            return "a captured step is a CUDA graph: it needs a GPU"
        if plan.strategy in ("ddp", "dp"):
            return "a captured step exchanges gradients itself: strategy nfold or one device"
        if plan.precision == "fp16" and workload.is_function:
            return "fp16 of a user's own workload is not captured"
        return None

    def edit_plan(self, value: bool, plan: Plan) -> Plan:
        return plan.edit(step="captured")
