"""Take the batches of a DataLoader in the order in which its workers finish them."""

from __future__ import annotations

from typing import Any

from nfold.interventions.input.loader_argument import LoaderArgument


class LoaderInOrder(LoaderArgument[bool]):
    """A DataLoader gives its batches in the order of its sampler."""

    default = True
    labels = {False: "in_order=False"}
    # Steps train on the batches in another order, which is not the same in two trainings.
    numerics = "training"
    permission = "order"

    def is_useful(self, profile: Any) -> bool:
        """Return whether several workers prepare batches whose order has no meaning.

        A script that does not shuffle may need the order, and batches of several DataLoaders in one
        step may belong together.
        """
        loader = profile.loader
        shuffles = loader is not None and loader.sampler not in ("", "SequentialSampler")
        return shuffles and loader.num_workers > 1 and not profile.companion_loaders

    def loader_arguments(self, value: bool) -> dict[str, Any]:
        return {"in_order": False}
