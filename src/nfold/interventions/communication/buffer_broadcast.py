"""Broadcast no buffers before a forward."""

from __future__ import annotations

from typing import Any

from nfold.core.plan import Plan
from nfold.core.source_edit import SourceEdit
from nfold.interventions.intervention import Intervention
from nfold.interventions.script_edits import set_wrapper_arguments


class BufferBroadcast(Intervention[bool]):
    """A wrapper broadcasts buffers before a forward."""

    default = True
    stored_name = "buffers"
    labels = {False: "broadcast_buffers=False"}
    kind = "remedy"
    numerics = "rounding"  # weights and statistics of rank 0 stay; others evaluate with their own
    needed_in_run = "DistributedDataParallel"
    switchable = True
    refused_in_workloads = "batch-norm statistics belong to each device: none are broadcast"
    applied_in = ("instrument/hooks/distributed_hooks.py",)

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if plan.devices == 1:
            return "one device broadcasts no buffers"
        if plan.strategy == "dp":
            return "nn.DataParallel copies the whole module, including buffers"
        return None

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.broadcast_buffers and profile.buffers > 0)

    def source_edits(self, value: bool, profile: Any) -> tuple[SourceEdit, ...] | None:
        return set_wrapper_arguments(profile, {"broadcast_buffers": False})
