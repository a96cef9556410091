"""A field report's grids on one machine: which devices, and what a user narrows, as axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nfold.bench.axes import GridAxes, parse_axes
from nfold.bench.reports import ReportGrid
from nfold.errors import UsageError
from nfold.machine import Machine
from nfold.plan import Plan, powers_of_two

MAX_CPU_DEVICES = 2
SELECTABLE_AXES = (
    "framework",
    "batch",
    "strategy",
    "precision",
    "layout",
    "input",
    "augment",
    "decode",
)
"""Axes of which a user may keep some of a report's values."""


def default_devices(machine: Machine, device: str | None = None) -> str:
    """The devices of a report as a comma list: 1, 2, 4 and so on up to what the machine has.

    Of a machine's cores two CPU devices are made at most.
    """
    kind = device or ("cuda" if machine.gpus else "cpu")
    most = machine.device_count(kind) if kind == "cuda" else min(MAX_CPU_DEVICES, machine.cores)
    counts = powers_of_two(max(1, most))
    return ",".join(str(n) if kind == "cuda" else f"cpu:{n}" for n in counts)


@dataclass(frozen=True, kw_only=True)
class ReportSelection:
    """What of a report a user wants: devices as a comma list, lengths in place of its own.

    ``kept`` maps an axis to the comma list of the values to keep of it.
    """

    devices: str
    device: str | None = None
    steps: int | None = None
    epochs: int | None = None
    axis_values: Mapping[str, str] = field(default_factory=dict)


def select_axes(parts: Sequence[ReportGrid], chosen: ReportSelection) -> list[GridAxes]:
    """The axes of all grids, read as a user's; those with nothing left are left out.

    Raises UsageError where nothing is left at all, where no grid has an axis that is to be
    narrowed, or where no grid has a length of the kind that is given.
    """
    _check_lengths(parts, chosen)
    for name in chosen.axis_values:
        if not any(name in part.axes for part in parts):
            raise UsageError(f"this report has no axis {name!r}; next: leave --{name} out")
    found = [axes for part in parts for axes in _axes(part, chosen)]
    if not found:
        said = ", ".join(f"--{name} {text}" for name, text in chosen.axis_values.items())
        raise UsageError(
            f"nothing of this report is left with {said or f'--devices {chosen.devices}'}; "
            "next: nfold bench --report NAME --dry-run shows its values"
        )
    return found


def _check_lengths(parts: Sequence[ReportGrid], chosen: ReportSelection) -> None:
    for name in ("steps", "epochs"):
        given = getattr(chosen, name)
        if given is not None and all(getattr(part, name) is None for part in parts):
            raise UsageError(f"--{name} {given}: no grid of this report is as long in {name}")


def _axes(part: ReportGrid, chosen: ReportSelection) -> list[GridAxes]:
    """The grid of one part; one for each number of devices where its epochs depend on that."""
    lists = {name: _selected_values(name, text, chosen) for name, text in part.axes.items()}
    if not all(lists.values()):
        return []
    whole = parse_axes(
        part.workload,
        {"devices": chosen.devices, **lists},
        common=Plan(
            device=chosen.device,
            steps=part.steps and (chosen.steps or part.steps),
            epochs=part.epochs and (chosen.epochs or part.epochs),
            warmup_steps=part.warmup_steps,
        ),
        parameters=part.parameters,
        scaling=part.scaling,
    )
    fitting = tuple(c for c in whole.changes["devices"] if _fits(part, c["devices"]))
    if not fitting:
        return []
    kept = replace(whole, changes={**whole.changes, "devices": fitting})
    return _per_devices(kept) if part.epochs_per_device else [kept]


def _fits(part: ReportGrid, devices: int) -> bool:
    return devices >= part.min_devices and (part.max_devices is None or devices <= part.max_devices)


def _selected_values(name: str, text: str, chosen: ReportSelection) -> str:
    """Of a part's comma list what is to be kept; what a user wrote is read before it counts."""
    if name not in chosen.axis_values:
        return text
    wanted = parse_axes("digits", {name: chosen.axis_values[name]}, common=Plan()).changes[name]
    values = {str(change[name]) for change in wanted}
    return ",".join(entry for entry in text.split(",") if entry in values)


def _per_devices(whole: GridAxes) -> list[GridAxes]:
    epochs = whole.common.epochs or 1
    return [
        replace(
            whole,
            changes={**whole.changes, "devices": (place,)},
            common=whole.common.edit(epochs=epochs * place["devices"]),
        )
        for place in whole.changes["devices"]
    ]
