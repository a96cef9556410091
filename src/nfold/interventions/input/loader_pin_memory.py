"""Copy batches of a DataLoader to pinned memory."""

from __future__ import annotations

from typing import Any

from nfold.core.plan import Plan
from nfold.interventions.input.loader_argument import LoaderArgument


class LoaderPinMemory(LoaderArgument[bool]):
    """A thread copies batches to pinned memory, from which a GPU copies them faster."""

    default = False
    labels = {True: "pin_memory=True"}
    needs_workers = False

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if plan.device == "cpu":
            return "CPU devices read the memory of the host: no batch is copied"
        return None

    def is_useful(self, profile: Any) -> bool:
        copies = profile.copies.per_step > profile.copies.pinned_per_step
        return super().is_useful(profile) and copies and not profile.loader.pin_memory

    def loader_arguments(self, value: bool) -> dict[str, Any]:
        return {"pin_memory": True}
