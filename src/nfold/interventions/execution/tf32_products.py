"""Compute fp32 matrix products in TF32."""

from __future__ import annotations

from typing import Any

from nfold.core.plan import Plan
from nfold.core.source_edit import SourceEdit
from nfold.interventions.intervention import TorchSetting
from nfold.interventions.script_edits import add_before_model

TF32 = "high"  # PyTorch's name of the precision


class Tf32Products(TorchSetting[bool]):
    """Products of fp32 matrices are computed in TF32, with 10 bits of mantissa."""

    default = False
    labels = {True: "TF32"}
    kind = "remedy"
    numerics = "training"  # errors of products are 1000 times those of fp32 rounding
    permission = "precision"
    switchable = True

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if plan.device == "cpu":
            return "CPU devices have no TF32"
        if plan.precision not in (None, "fp32"):
            return f"precision {plan.precision} has no fp32 products"
        return None

    def switchable_in_workload(self, plan: Plan) -> bool:
        return plan.step == "eager"  # a captured or compiled step keeps its kernels

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.precision == "fp32")

    def read(self, torch: Any) -> Any:
        # PyTorch raises RuntimeError if a script sets TF32 by both of its interfaces.
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:
            return None

    def write(self, torch: Any, setting: Any) -> None:
        if setting is not None:
            torch.set_float32_matmul_precision(TF32 if setting is True else setting)

    def source_edits(self, value: bool, profile: Any) -> tuple[SourceEdit, ...] | None:
        statement = f'torch.set_float32_matmul_precision("{TF32}")'
        return add_before_model(profile, statement)
