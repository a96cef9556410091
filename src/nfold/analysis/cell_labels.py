"""Which fields of the plan differ between cells, and what cells are called by them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nfold.analysis.cells import Cell
from nfold.core.format import (
    STATUS_LABELS,
    pluralize,
    terminal_safe,
)
from nfold.core.measurement import Measurement
from nfold.core.plan import Plan

CELL_AXES = (
    "workload",
    "framework",
    "device",
    "precision",
    "layout",
    "input",
    "decode",
    "cache",
    "bad_images",
    "augment",
    "step",
    "kernels",
    "steps_per_execution",
    "allocation",
    "epochs",
    "steps",
    "warmup_steps",
    "seed",
    "batch",
    "accumulate",
    "devices",
    "strategy",
    "exchange",
    "batch_norm",
    "workers",
    "cores_per_device",
)
"""Everything that tells cells apart, in the order of the table's columns and of its lines."""

AXIS_NAMES = {
    "batch_norm": "batch norm",
    "bad_images": "bad images",
    "steps_per_execution": "steps per execution",
    "device": "device type",
    "cores_per_device": "cores per device",
    "workers": "loader workers",
    "warmup_steps": "warm-up steps",
}
"""Where a reader's word differs from the plan's."""

DEVICE_DEPENDENT_AXES = ("strategy", "workers", "cores_per_device")
"""Fields that may be other ones on another number of devices: alone that is no difference."""

AXES_HIDDEN_AT_DEFAULT = (
    "kernels",
    "exchange",
    "batch_norm",
    "accumulate",
    "steps_per_execution",
    "allocation",
    "cache",
    "bad_images",
)
"""Fields that are not worth a word at their default."""

SELF_EXPLANATORY_AXES = ("framework", "layout", "precision", "input", "augment", "step", "device")
"""Fields whose values say what they are; a number needs its name beside it."""


def axis_value(measurement: Measurement, axis: str) -> Any:
    """The value of a plan's field, or the written workload."""
    return str(measurement.workload) if axis == "workload" else getattr(measurement.plan, axis)


def axis_name(axis: str) -> str:
    """The axis in a reader's words."""
    return AXIS_NAMES.get(axis, axis)


def varying_axes(cells: Sequence[Cell]) -> tuple[str, ...]:
    """The axes in which cells differ; devices and batch where they do in none."""
    found = tuple(axis for axis in CELL_AXES if _varies(cells, axis))
    return found or ("devices", "batch")


def _varies(cells: Sequence[Cell], axis: str) -> bool:
    by_devices: dict[Any, set[Any]] = defaultdict(set)
    for cell in cells:
        if axis != "workers" or cell.first.plan.input == "loader":
            by_devices[cell.first.plan.devices].add(axis_value(cell.first, axis))
    if axis in DEVICE_DEPENDENT_AXES:
        return any(len(values) > 1 for values in by_devices.values()) or _mixed(by_devices, axis)
    return len(set().union(*by_devices.values())) > 1


def _mixed(by_devices: dict[Any, set[Any]], axis: str) -> bool:
    several = [values for devices, values in by_devices.items() if (devices or 1) > 1]
    return axis == "strategy" and len(set().union(*several)) > 1


def shared_values(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """What is the same in all cells, as (name, value), without what does not matter there."""
    differing = varying_axes(cells)
    plan = cells[0].first.plan
    kept = [axis for axis in CELL_AXES if axis not in differing and _matters(axis, plan)]
    pairs = [(axis_name(axis), _shared_value(cells, axis)) for axis in kept]
    return [(label, text) for label, text in pairs if text]


def _matters(axis: str, plan: Plan) -> bool:
    """A GPU is not a share of cores; resident data needs no loader; one length is set.

    Kernels are not searched for, gradients go as they are, batch norm is a device's own, a step
    has one part and a call one step, memory is taken as ever, image files are neither cached nor
    bad, unless somebody wanted it otherwise.
    """
    if axis in AXES_HIDDEN_AT_DEFAULT:
        return bool(getattr(plan, axis) != getattr(Plan(), axis))
    if axis == "cores_per_device":
        return plan.device == "cpu"
    if axis == "workers":
        return plan.input == "loader" and bool(plan.workers)
    return axis != "workload" and (axis == "seed" or getattr(plan, axis) is not None)


def _shared_value(cells: Sequence[Cell], axis: str) -> str:
    by_devices = {cell.first.plan.devices or 1: axis_value(cell.first, axis) for cell in cells}
    if axis == "strategy":
        by_devices = {k: v for k, v in by_devices.items() if k > 1}
    values = set(by_devices.values())
    if len(values) > 1:
        pairs = sorted(by_devices.items())
        return ", ".join(f"{v} on {pluralize(devices, 'device')}" for devices, v in pairs)
    return str(values.pop()) if values else ""


def secondary_axes(cells: Sequence[Cell]) -> tuple[str, ...]:
    """The varying axes besides devices, batch and strategy: what a line's dashes stand for."""
    return tuple(a for a in varying_axes(cells) if a not in ("devices", "batch", "strategy"))


def cell_label(measurement: Measurement, axes: Sequence[str]) -> str:
    """A cell by some of its axes: ``2 devices · ddp · batch 128 · channels_last``."""
    return " · ".join(filter(None, (_labelled(measurement, axis) for axis in axes)))


def _labelled(measurement: Measurement, axis: str) -> str:
    found = axis_value(measurement, axis)
    if axis == "devices":
        return pluralize(found or 1, "device")
    if axis == "strategy":
        return "" if found == "single" else str(found)
    if found is None:
        return ""
    return (
        str(found) if axis in (*SELF_EXPLANATORY_AXES, "workload") else f"{axis_name(axis)} {found}"
    )


@dataclass
class Footnotes:
    """Footnotes while a table is made: the same text has the same number."""

    texts: list[str] = field(default_factory=list)

    def mark(self, text: str) -> int:
        """The number of a note, counted from 1."""
        text = terminal_safe(text)
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def failure_location(measurement: Measurement) -> str:
    """The cause of a failure with its rank and step: ``rank 1, step 12: no memory``."""
    cause = measurement.cause
    if cause is None:
        return STATUS_LABELS[measurement.status]
    places = [("rank", cause.rank), ("step", cause.step)]
    named = [f"{name} {value}" for name, value in places if value is not None]
    told = all(place in cause.text for place in named)
    prefix = "" if told or not named else f"{', '.join(named)}: "
    return terminal_safe(f"{prefix}{cause.text}")
