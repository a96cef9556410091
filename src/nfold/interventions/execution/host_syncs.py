"""Do not wait for values that the host reads from a device."""

from __future__ import annotations

from typing import Any

from nfold.core.plan import Plan
from nfold.core.source_edit import AddUpOnDevice, SourceEdit
from nfold.interventions.intervention import Intervention
from nfold.interventions.script_edits import edit_lines


class HostSyncs(Intervention[bool]):
    """The host waits for values that it reads from a device in a step (``.item()``).

    Otherwise a read gets the value that was really read last.
    """

    default = True
    labels = {False: "no host reads"}
    kind = "remedy"
    numerics = "same"
    switchable = True
    refused_in_runs = (
        "a run cannot know when the script needs a value; next: read it every 50 steps"
    )
    refused_in_workloads = "the host reads nothing from the device in a step"
    applied_in = ("instrument/hooks/runtime_hooks.py",)

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if plan.device == "cpu":
            return "operations on a CPU device are synchronous: no host read waits"
        return None

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.host_syncs > 0)

    def source_edits(self, value: bool, profile: Any) -> tuple[SourceEdit, ...] | None:
        return edit_lines(profile, "host_sync", AddUpOnDevice)

    def simulated_ms(self, value: bool, scenario: Any, devices: int) -> float:
        return float(scenario.host_syncs_ms) if value else 0.0
