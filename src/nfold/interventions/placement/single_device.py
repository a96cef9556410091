"""Choose the device of a plan for one device."""

from __future__ import annotations

from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention


class SingleDevice(Intervention[int]):
    """The device of a plan for one device."""

    default = 0
    applied_in = ("core/variant.py",)  # device_of

    def check(self, value: int) -> None:
        if value < 0:
            raise UsageError(f"{self.name} {value}: allowed are whole numbers from 0")

    def refusal(self, value: int, plan: Plan) -> str | None:
        return None if plan.devices == 1 else "a single device is chosen for a plan on one device"
