"""Freezes the objects of a script after its first step, for ``garbage_collection_frozen``."""

from __future__ import annotations

import gc

from nfold.core.errors import Unsupported
from nfold.interventions.execution.garbage_collection_frozen import FULL_COLLECTION_INTERVAL


class GarbageCollectionFreeze:
    """Python's garbage collector with fewer objects and fewer collections, until ``restore``."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._thresholds: tuple[int, int, int] | None = None

    def on_first_step(self) -> None:
        """Freeze all objects. Raises Unsupported if the script has disabled the collector."""
        if not self._enabled:
            return
        if not gc.isenabled():
            raise Unsupported("garbage_collection_frozen: the script disables garbage collection")
        self._thresholds = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*self._thresholds[:2], FULL_COLLECTION_INTERVAL)

    @property
    def has_applied(self) -> bool:
        return self._thresholds is not None

    def restore(self) -> None:
        if self._thresholds is not None:
            gc.unfreeze()
            gc.set_threshold(*self._thresholds)
            self._thresholds = None
