"""Delete gradients instead of filling them with zeros."""

from __future__ import annotations

from typing import Any

from nfold.core.source_edit import SourceEdit
from nfold.interventions.intervention import Intervention
from nfold.interventions.script_edits import edit_calls


class SetGradsToNone(Intervention[bool]):
    """``zero_grad(set_to_none=False)`` of a script deletes the gradients.

    Refused if a parameter has no gradient in a step: an optimizer changes a parameter whose
    gradient is zero, by weight decay or momentum, and skips one without a gradient.
    """

    default = False
    labels = {True: "set_to_none=True"}
    kind = "remedy"
    numerics = "same"
    refused_in_workloads = "workloads delete their gradients already"
    needed_in_run = "zero_grad(set_to_none=False)"
    applied_in = ("instrument/hooks/optimizer_hooks.py",)

    def is_useful(self, profile: Any) -> bool:
        return "zeroed_gradients" in profile.source_locations

    def source_edits(self, value: bool, profile: Any) -> tuple[SourceEdit, ...] | None:
        return edit_calls(profile, "zeroed_gradients", "zero_grad", {"set_to_none": True})
