"""Compute the forward of a script's model in bf16, with fp32 parameters."""

from __future__ import annotations

from typing import Any

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention


class AutocastBf16(Intervention[bool]):
    """The forward of the model runs under ``torch.autocast``; its outputs are converted to fp32.

    A script that uses autocast or GradScaler itself is refused. There is no source edit: which
    statement calls the model is not known, and the loss may be inside the model or outside.
    """

    default = False
    labels = {True: "autocast to bf16"}
    kind = "remedy"
    numerics = "training"  # matrix products have 8 bits of mantissa
    permission = "precision"
    refused_in_workloads = "the plan sets the precision"
    needed_in_run = "model that trains"
    applied_in = ("instrument/hooks/autocast_hooks.py",)

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if plan.precision not in (None, "fp32", "tf32"):
            return f"the precision is {plan.precision} already"
        return None

    def is_useful(self, profile: Any) -> bool:
        return profile.autocast is None and profile.precision in ("fp32", "tf32")
