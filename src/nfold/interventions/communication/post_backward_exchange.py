"""Let independent devices exchange all gradients at once before an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping

from nfold.interventions.intervention import Intervention


class PostBackwardExchange(Intervention[bool]):
    """Independent devices exchange all gradients before an optimizer step, without overlap."""

    default = False
    stored_name = "late_exchange"
    labels = {True: "all-reduce after backward"}
    switchable = True
    refused_in_workloads = "a workload exchanges its gradients itself"
    applied_in = ("instrument/optimizer_steps.py",)

    def conflict(self, value: bool, interventions: Mapping[str, object]) -> str | None:
        if "independent" in interventions:
            return None
        return "devices that are not independent exchange their gradients themselves"
