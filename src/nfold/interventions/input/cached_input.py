"""Repeat the first batches, from the host or from the device."""

from __future__ import annotations

from typing import Literal

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention, WorkloadFacts


class CachedInput(Intervention[Literal["real", "replayed", "resident"]]):
    """``replayed`` and ``resident`` repeat the first batches from the host or the device."""

    default = "real"
    labels = {"replayed": "replayed input", "resident": "input on the device"}
    switchable = True
    applies_to_operations = True
    applied_in = (
        "instrument/input/dataloader_hook.py",
        "instrument/input/batch_functions.py",
        "engines/torch/input/batch_source.py",
    )

    def refusal(self, value: str, plan: Plan) -> str | None:
        return "the data are on the device" if plan.input == "resident" else None

    def torch_refusal(self, value: str, plan: Plan, workload: WorkloadFacts) -> str | None:
        if workload.is_operation and value == "resident" and plan.device == "cpu":
            return "a CPU device reads the host's memory: nothing is copied"
        return None

    def switchable_in_workload(self, plan: Plan) -> bool:
        return True
