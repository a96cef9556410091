"""Let the workers of a DataLoader prepare more or fewer batches ahead."""

from __future__ import annotations

from typing import Any

from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.interventions.input.loader_argument import LoaderArgument


class LoaderPrefetchFactor(LoaderArgument[int | None]):
    """Batches that each worker of a DataLoader prepares ahead; None: as many as the script says."""

    default = None

    def check(self, value: int | None) -> None:
        if value is not None and value < 1:
            raise UsageError(f"{self.name} {value}: allowed are whole numbers from 1")

    def label(self, value: int | None) -> str:
        return f"prefetch_factor={value}"

    def values_to_try(self, profile: Any, plan: Plan, cores: int) -> tuple[int, ...]:
        return tuple(value for value in (4, 8) if value != profile.loader.prefetch_factor)

    def loader_arguments(self, value: int | None) -> dict[str, Any]:
        return {"prefetch_factor": value}
