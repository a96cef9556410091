"""Let the host continue while batches in pinned memory are copied to a GPU."""

from __future__ import annotations

from typing import Any

from nfold.core.plan import Plan
from nfold.core.source_edit import SetKeywords, SourceEdit
from nfold.interventions.intervention import Intervention


class NonBlockingCopies(Intervention[bool]):
    """``Tensor.to`` and ``Tensor.cuda`` of pinned memory do not wait for the copy.

    A call that passes ``non_blocking`` itself stays as it is. The numbers are the same unless the
    script writes into the same pinned memory again right after the call.
    """

    default = False
    labels = {True: "non_blocking=True"}
    kind = "remedy"
    numerics = "same"
    refused_in_workloads = "workloads copy their batches without waiting already"
    needed_in_run = "copy of pinned memory that waits"
    applied_in = ("instrument/hooks/pinned_copies.py",)

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if plan.device == "cpu":
            return "CPU devices read the memory of the host: no batch is copied"
        return None

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.copies.waiting_per_step > 0)

    def source_edits(self, value: bool, profile: Any) -> tuple[SourceEdit, ...] | None:
        """Return the edits of ``to`` at all lines that copy in a step.

        A line that calls ``cuda`` instead cannot be edited by them.
        """
        edits = [
            SetKeywords(
                location=place.line,
                function="to",
                keywords=(("non_blocking", "True"),),
                every_call=True,
            )
            for place in profile.source_locations.get("copy", ())
            if place.per_step and place.package_line is None
        ]
        return tuple(edits) or None
