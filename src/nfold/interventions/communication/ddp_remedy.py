"""The base class of remedies that change how DistributedDataParallel works."""

from __future__ import annotations

from typing import TypeVar

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention

T = TypeVar("T")


class DdpRemedy(Intervention[T]):
    """An argument of DistributedDataParallel, or a hook of it."""

    kind = "remedy"
    needed_in_run = "DistributedDataParallel"

    def refusal(self, value: T, plan: Plan) -> str | None:
        if plan.devices == 1:
            return "on one device, DistributedDataParallel exchanges no gradients"
        if plan.strategy != "ddp":
            return "only DistributedDataParallel has it"
        return None
