"""Cells that differ in the number of devices alone: the rows of tables with devices across."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nfold.report import axes
from nfold.report.results import CellResult

GROUP_DIFFERENCES = ("devices", "batch", *axes.DEVICE_DEPENDENT_AXES)
"""Axes that may differ within a group; of the batch, only as the groups are made."""


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Cells by their number of devices. ``batch`` is the global one, or said to be a device's."""

    cells: dict[int, CellResult]
    batch: str

    @property
    def smallest(self) -> CellResult:
        """The cell on the fewest devices."""
        return self.cells[min(self.cells)]

    @property
    def largest(self) -> CellResult:
        """The cell on the most devices."""
        return self.cells[max(self.cells)]


def group_by_batch(found: Sequence[CellResult]) -> list[DeviceGroup]:
    """Groups of one global batch; where each of those has one cell, of one batch a device."""
    alike: dict[tuple[Any, ...], list[CellResult]] = defaultdict(list)
    for result in sorted(found, key=lambda r: r.devices):
        alike[_kind(result)].append(result)
    return [group for results in alike.values() for group in _split(results)]


def _kind(result: CellResult) -> tuple[Any, ...]:
    kept = [axis for axis in axes.CELL_AXES if axis not in GROUP_DIFFERENCES]
    return tuple(axes.axis_value(result.cell.first, axis) for axis in kept)


def _split(results: Sequence[CellResult]) -> list[DeviceGroup]:
    strong = _by([(r.batch, r) for r in results])
    weak = _by([(r.batch // r.devices, r) for r in results])
    if len(strong) == len(results) > len(weak):
        return [
            DeviceGroup(cells=cells, batch=f"{batch:,} a device") for batch, cells in weak.items()
        ]
    return [DeviceGroup(cells=cells, batch=f"{batch:,}") for batch, cells in strong.items()]


def _by(keyed: Sequence[tuple[int, CellResult]]) -> dict[int, dict[int, CellResult]]:
    groups: dict[int, dict[int, CellResult]] = defaultdict(dict)
    for key, result in keyed:
        groups[key].setdefault(result.devices, result)
    return dict(sorted(groups.items()))
