"""Keep the weights of convolutions in channels_last order."""

from __future__ import annotations

from typing import Any

from nfold.core.plan import Plan
from nfold.core.source_edit import SourceEdit
from nfold.interventions.intervention import Intervention
from nfold.interventions.script_edits import wrap_moved_model


class ChannelsLast(Intervention[bool]):
    """Weights of a script's convolutions are in channels_last order."""

    default = False
    labels = {True: "channels_last"}
    kind = "remedy"
    numerics = "rounding"
    needed_in_run = "convolution"
    refused_in_workloads = "the plan sets the layout"
    applied_in = ("instrument/hooks/model_hooks.py",)

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if plan.layout == "channels_last":
            return "the layout is channels_last already"
        return None

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.convolutions > 0)

    def source_edits(self, value: bool, profile: Any) -> tuple[SourceEdit, ...] | None:
        return wrap_moved_model(profile, "{}.to(memory_format=torch.channels_last)")
