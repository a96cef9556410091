"""Labels of cells: the fields of the plan in which cells differ, and their values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nfold.analysis.cells import Cell
from nfold.core.format import STATUS_LABELS, pluralize, terminal_safe
from nfold.core.measurement import Measurement
from nfold.core.plan import Plan

CELL_AXES = (
    *("workload", "framework", "device", "precision", "layout"),
    *("input", "decode", "cache", "bad_images", "augment"),
    *("step", "kernels", "steps_per_execution", "allocation", "memory", "optimizer_state"),
    *("epochs", "steps", "warmup_steps", "seed", "batch", "accumulate"),
    *("devices", "strategy", "exchange", "batch_norm", "workers", "cores_per_device"),
)
"""The fields that distinguish cells, in the order of a table's columns and rows."""

AXIS_NAMES = {
    "batch_norm": "batch norm",
    "bad_images": "bad images",
    "steps_per_execution": "steps per execution",
    "optimizer_state": "optimizer state",
    "device": "device type",
    "cores_per_device": "cores per device",
    "workers": "loader workers",
    "warmup_steps": "warm-up steps",
}  # where they differ from the field

DEVICE_DEPENDENT_AXES = ("strategy", "workers", "cores_per_device")
"""Fields that may differ between numbers of devices; cells differ only at equal numbers."""

AXES_HIDDEN_AT_DEFAULT = (
    *("kernels", "exchange", "batch_norm", "accumulate"),
    *("steps_per_execution", "allocation", "cache", "bad_images", "memory", "optimizer_state"),
)

SELF_EXPLANATORY_AXES = ("framework", "layout", "precision", "input", "augment", "step", "device")
"""Fields whose values are shown without the name of the field."""


def axis_value(measurement: Measurement, axis: str) -> Any:
    """Return the value of a plan's field, or the written workload."""
    return str(measurement.workload) if axis == "workload" else getattr(measurement.plan, axis)


def axis_name(axis: str) -> str:
    return AXIS_NAMES.get(axis, axis)


def varying_axes(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return the axes in which cells differ; devices and batch if they are all equal."""
    found = tuple(axis for axis in CELL_AXES if _varies(cells, axis))
    return found or ("devices", "batch")


def _varies(cells: Sequence[Cell], axis: str) -> bool:
    by_devices: dict[Any, set[Any]] = defaultdict(set)
    for cell in cells:
        if axis != "workers" or cell.first.plan.input == "loader":
            by_devices[cell.first.plan.devices].add(axis_value(cell.first, axis))
    if axis in DEVICE_DEPENDENT_AXES:
        several = [values for devices, values in by_devices.items() if (devices or 1) > 1]
        mixed = axis == "strategy" and len(set().union(*several)) > 1
        return mixed or any(len(values) > 1 for values in by_devices.values())
    return len(set().union(*by_devices.values())) > 1


def shared_values(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Return the (name, value) pairs that are equal in all cells and relevant there."""
    differing = varying_axes(cells)
    plan = cells[0].first.plan
    kept = [axis for axis in CELL_AXES if axis not in differing and _is_relevant(axis, plan)]
    pairs = [(axis_name(axis), _shared_value(cells, axis)) for axis in kept]
    return [(label, text) for label, text in pairs if text]


def _is_relevant(axis: str, plan: Plan) -> bool:
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
    """Return the varying axes besides devices, batch and strategy: the dashes of a line."""
    return tuple(a for a in varying_axes(cells) if a not in ("devices", "batch", "strategy"))


def cell_label(measurement: Measurement, axes: Sequence[str]) -> str:
    """Return a label such as ``2 devices · ddp · batch 128 · channels_last``."""
    return " · ".join(filter(None, (_axis_label(measurement, axis) for axis in axes)))


def _axis_label(measurement: Measurement, axis: str) -> str:
    value = axis_value(measurement, axis)
    if axis == "devices":
        return pluralize(value or 1, "device")
    if axis == "strategy":
        return "" if value == "single" else str(value)
    if value is None:
        return ""
    named = axis not in (*SELF_EXPLANATORY_AXES, "workload")
    return f"{axis_name(axis)} {value}" if named else str(value)


@dataclass
class Footnotes:
    """The footnotes of a table; equal texts have one number."""

    texts: list[str] = field(default_factory=list)

    def mark(self, text: str) -> int:
        """Return the number of a note, from 1."""
        text = terminal_safe(text)
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def failure_location(measurement: Measurement) -> str:
    """Return the cause of a failure with rank and step: ``rank 1, step 12: no memory``."""
    cause = measurement.cause
    if cause is None:
        return STATUS_LABELS[measurement.status]
    pairs = [("rank", cause.rank), ("step", cause.step)]
    parts = [f"{name} {value}" for name, value in pairs if value is not None]
    prefix = "" if all(part in cause.text for part in parts) else f"{', '.join(parts)}: "
    return terminal_safe(f"{prefix}{cause.text}")
