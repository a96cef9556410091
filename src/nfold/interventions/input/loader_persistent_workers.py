"""Keep the workers of a DataLoader from one epoch to the next."""

from __future__ import annotations

from typing import Any

from nfold.interventions.input.loader_argument import LoaderArgument


class LoaderPersistentWorkers(LoaderArgument[bool]):
    """The workers of a DataLoader live as long as the DataLoader, not only for one epoch."""

    default = False
    labels = {True: "persistent_workers=True"}

    def is_useful(self, profile: Any) -> bool:
        return super().is_useful(profile) and not profile.loader.persistent_workers

    def loader_arguments(self, value: bool) -> dict[str, Any]:
        return {"persistent_workers": True}
