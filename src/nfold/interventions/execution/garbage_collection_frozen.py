"""Search for unreachable Python objects rarely, and not among those of the start."""

from __future__ import annotations

from typing import Any

from nfold.core.source_edit import AddStatement, SourceEdit
from nfold.interventions.intervention import Intervention

FULL_COLLECTION_INTERVAL = 1000
"""Collections of the second generation per collection of all objects; Python's default is 10."""


class GarbageCollectionFrozen(Intervention[bool]):
    """Python's garbage collector ignores the objects that exist after the first step.

    A collection of all other objects is rare. Ranks would otherwise collect at different times, and
    wait for each other. Memory of unreachable objects is freed later.
    """

    default = False
    labels = {True: "frozen garbage collection"}
    kind = "remedy"
    numerics = "same"
    refused_in_workloads = "a step of a workload makes few Python objects"
    needed_in_run = "enabled garbage collection"
    applied_in = ("instrument/hooks/garbage_collection.py",)

    def source_edits(self, value: bool, profile: Any) -> tuple[SourceEdit, ...] | None:
        """Return statements before the line that makes the optimizer, or else the wrapper."""
        for event in ("optimizer", "wrapper"):
            place = profile.most_frequent(event)
            if place is not None and place.package_line is None:
                return tuple(_statement_before(place.line, each) for each in STATEMENTS)
        return None


STATEMENTS = (
    "gc.collect()",
    "gc.freeze()",
    f"gc.set_threshold(*gc.get_threshold()[:2], {FULL_COLLECTION_INTERVAL})",
)


def _statement_before(location: str, statement: str) -> SourceEdit:
    # Before: the statement at the line may be a return.
    return AddStatement(
        location=location, statement=statement, place="before", imports=("import gc",)
    )
