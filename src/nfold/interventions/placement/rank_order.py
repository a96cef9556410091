"""Give the ranks other devices, or the data of other ranks."""

from __future__ import annotations

from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention, WorkloadFacts


class RankOrder(Intervention[tuple[int, ...]]):
    """A permutation of the ranks; empty: the usual order."""

    default = ()

    def check(self, value: tuple[int, ...]) -> None:
        if sorted(value) != list(range(len(value))):
            raise UsageError(f"{self.name} {value}: allowed are permutations of 0 to N-1")

    def refusal(self, value: tuple[int, ...], plan: Plan) -> str | None:
        devices = plan.devices or 1
        return None if len(value) == devices else f"{value} is not an order of {devices} devices"

    def torch_refusal(
        self, value: tuple[int, ...], plan: Plan, workload: WorkloadFacts
    ) -> str | None:
        return "nn.DataParallel has one rank" if plan.strategy == "dp" else None


class DeviceOrder(RankOrder):
    """Rank k drives device ``devices[k]``."""

    applied_in = ("core/variant.py", "instrument/rank_environment.py")

    def label(self, value: tuple[int, ...]) -> str:
        return "ranks on other devices"


class DataShares(RankOrder):
    """Rank k gets the data of rank ``data_shares[k]``."""

    stored_name = "shares"
    applied_in = ("engines/torch/variant_support.py", "instrument/input/dataloader_hook.py")
