"""Update all parameters of an optimizer in one kernel."""

from __future__ import annotations

from typing import Any

from nfold.core.source_edit import SourceEdit
from nfold.interventions.intervention import Intervention
from nfold.interventions.script_edits import edit_calls

FUSED_OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad")


class FusedOptimizer(Intervention[bool]):
    """Adam, AdamW, SGD and Adagrad update their parameters in fused kernels.

    A script that passes ``foreach``, ``fused``, ``capturable`` or ``differentiable`` has chosen an
    implementation itself, and is refused.
    """

    default = False
    labels = {True: "fused=True"}
    kind = "remedy"
    numerics = "rounding"  # operations are fused, and rounded once instead of after each
    refused_in_workloads = "workloads choose the implementation of their optimizers"
    needed_in_run = "Adam, AdamW, SGD or Adagrad"
    applied_in = ("instrument/hooks/optimizer_hooks.py",)

    def is_useful(self, profile: Any) -> bool:
        names = set(profile.optimizers) - set(profile.chosen_optimizers)
        return not names.isdisjoint(FUSED_OPTIMIZERS)

    def source_edits(self, value: bool, profile: Any) -> tuple[SourceEdit, ...] | None:
        """Return the edits of all lines that make an optimizer, if all are of one class."""
        if len(set(profile.optimizers)) != 1:
            return None
        return edit_calls(profile, "optimizer", profile.optimizers[0], {"fused": True})
