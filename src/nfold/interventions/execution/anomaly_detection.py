"""Do not let autograd look for NaN."""

from __future__ import annotations

from typing import Any

from nfold.core.source_edit import SourceEdit
from nfold.interventions.intervention import Intervention
from nfold.interventions.script_edits import edit_calls


class AnomalyDetection(Intervention[bool]):
    """Autograd of a script looks for NaN if the script asks for it."""

    default = True
    labels = {False: "no anomaly detection"}
    kind = "remedy"
    numerics = "same"
    needed_in_run = "anomaly detection in the script"
    switchable = True
    refused_in_workloads = "anomaly detection is off in workloads"
    applied_in = ("instrument/hooks/runtime_hooks.py",)

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.detects_anomalies)

    def simulated_ms(self, value: bool, scenario: Any, devices: int) -> float:
        return float(scenario.anomaly_ms) if value else 0.0

    def source_edits(self, value: bool, profile: Any) -> tuple[SourceEdit, ...] | None:
        return edit_calls(profile, "anomaly", "set_detect_anomaly", {"mode": False})
