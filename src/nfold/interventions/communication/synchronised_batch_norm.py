"""Compute batch norm over the samples of each device."""

from __future__ import annotations

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention


class SynchronisedBatchNorm(Intervention[bool]):
    """Batch norm is synchronised if the plan or the script says so."""

    default = True
    labels = {False: "no SyncBatchNorm"}
    kind = "remedy"
    numerics = "training"
    permission = "batch_norm"
    needed_in_run = "SyncBatchNorm"
    switchable = True
    changes_communication = True
    # while a workload runs, and in a script
    applied_in = ("engines/torch/trainer.py", "instrument/hooks/distributed_hooks.py")

    def refusal(self, value: bool, plan: Plan) -> str | None:
        return None if plan.batch_norm == "synchronised" else "batch norm is not synchronised"

    def switchable_in_workload(self, plan: Plan) -> bool:
        return True

    def edit_plan(self, value: bool, plan: Plan) -> Plan:
        return plan.edit(batch_norm="device")
