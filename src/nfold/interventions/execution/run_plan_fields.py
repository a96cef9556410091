"""Give the plan of ``nfold.Run`` other fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nfold.core.plan import KEPT_PLAN_VARIABLE, Plan
from nfold.core.source_edit import SourceEdit
from nfold.interventions.intervention import Intervention
from nfold.interventions.script_edits import edit_calls


class RunPlanFields(Intervention[tuple[tuple[str, str], ...]]):
    """Fields of the plan that ``nfold.Run`` has in place of the script's, and their values."""

    default = ()
    kind = "remedy"
    numerics = "training"  # at most: each field has its own class and permission
    permission = "precision"
    refused_in_workloads = "workloads have a plan"
    applied_in = ("api.py",)

    def check(self, value: tuple[tuple[str, str], ...]) -> None:
        """Raise UsageError for an unknown field or value."""
        Plan.from_dict(dict(value))

    def label(self, value: tuple[tuple[str, str], ...]) -> str:
        return ", ".join(f"{name} {setting}" for name, setting in value)

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.source_locations.get("run"))

    def environment(
        self, value: tuple[tuple[str, str], ...], environment: Mapping[str, str]
    ) -> dict[str, str]:
        return {KEPT_PLAN_VARIABLE: json.dumps(dict(value))}

    def source_edits(
        self, value: tuple[tuple[str, str], ...], profile: Any
    ) -> tuple[SourceEdit, ...] | None:
        return edit_calls(profile, "run", "Run", dict(value))
