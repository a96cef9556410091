"""Exchange the gradients of accumulated batches with the last one only."""

from __future__ import annotations

from typing import Any

from nfold.core.plan import Plan
from nfold.core.source_edit import ExchangeOnce, SourceEdit
from nfold.interventions.intervention import Intervention
from nfold.interventions.script_edits import edit_lines


class MicroBatchExchange(Intervention[bool]):
    """Every accumulated batch exchanges gradients, as a script without ``no_sync`` does."""

    default = True
    stored_name = "repeated_exchange"
    labels = {False: "one all-reduce per step"}
    kind = "remedy"
    numerics = "rounding"
    switchable = True
    refused_in_runs = "only the script knows which batch ends a step; next: add model.no_sync()"
    by_hand = "all forwards and backwards but the last in model.no_sync()"
    applied_in = ("instrument/hooks/distributed_hooks.py",)

    def refusal(self, value: bool, plan: Plan) -> str | None:
        repeated = plan.devices != 1 and plan.accumulate > 1
        return None if repeated else "gradients are exchanged once a step"

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.gradient_exchanges > 1)

    def source_edits(self, value: bool, profile: Any) -> tuple[SourceEdit, ...] | None:
        if profile.trainer:
            return None
        return edit_lines(profile, "step", ExchangeOnce)
