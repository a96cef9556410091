"""Keep the weights of convolutions in channels_last order."""

from __future__ import annotations

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention


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
