"""Compile the model of a script that compiles nothing."""

from __future__ import annotations

from typing import Any, Literal

from nfold.core.plan import Plan
from nfold.core.source_edit import SourceEdit
from nfold.interventions.intervention import Intervention
from nfold.interventions.script_edits import add_after_model

Mode = Literal["", "default", "reduce-overhead"]


class CompiledModel(Intervention[Mode]):
    """The mode of torch.compile for the model of a script that compiles nothing."""

    default = ""
    labels = {"default": "torch.compile", "reduce-overhead": "torch.compile, CUDA graphs"}
    kind = "remedy"
    numerics = "rounding"
    needed_in_run = "model that trains"
    refused_in_workloads = "the plan sets how steps are compiled"
    applied_in = ("instrument/hooks/model_hooks.py",)

    def refusal(self, value: str, plan: Plan) -> str | None:
        if "compiled" in str(plan.step):
            return "the step is compiled already"
        return None

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.parallel != "dp")  # the replicas of every step are not compiled

    def values_to_try(self, profile: Any, plan: Plan, cores: int) -> tuple[Mode, ...]:
        return ("default", "reduce-overhead") if plan.device == "cuda" else ("default",)

    def source_edits(self, value: str, profile: Any) -> tuple[SourceEdit, ...] | None:
        mode = "" if value == "default" else f'mode="{value}"'
        # In place, so that checkpoints keep the names of parameters. A bare nn.Sequential stays
        # as it is: PyTorch compiles no frames of its own modules.
        return add_after_model(profile, f"{{target}}.compile({mode})")
