"""Where measurements are kept, as those who measure see it."""

from __future__ import annotations

from typing import Protocol

from nfold.measurement import Measurement


class MeasurementStore(Protocol):
    """``nfold.store.store.Store``, or what stands in for it."""

    def find(self, cell: str, repeat: int) -> Measurement | None:
        """The latest measurement of a cell's repeat, or None."""

    def append(self, measurement: Measurement) -> None:
        """Keep a measurement; it is durable when this returns."""
