"""Grids: the product of the axes that a user gives as comma-separated lists."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from nfold import workloads
from nfold.core.errors import ExtraMissing, NfoldError, UnknownValue, UsageError
from nfold.core.machine import Machine
from nfold.core.measurement import cell_id
from nfold.core.plan import ALLOWED_VALUES, MINIMUM_VALUES, Plan, parse_device_count
from nfold.core.workload import Workload

Scaling = Literal["strong", "weak"]
SCALINGS: tuple[str, ...] = get_args(Scaling)

CHOICE_AXES = (
    *("framework", "layout", "precision", "strategy", "exchange", "batch_norm", "input"),
    *("decode", "cache", "augment", "step", "kernels", "allocation"),
)
INTEGER_AXES = ("batch", "accumulate", "steps_per_execution", "workers", "seed")
LIST_AXES = ("devices", *CHOICE_AXES, *INTEGER_AXES)  # plan fields that take a comma-separated list

PlanChange = Mapping[str, Any]  # plan fields and values of one entry of a list

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GridAxes:
    """The axes of a grid.

    ``changes`` maps a plan field to the entries of its list, ``parameters`` a workload parameter to
    its values. Under ``weak`` scaling the batch is per device.
    """

    workload: Workload
    common: Plan = field(default_factory=Plan)
    changes: Mapping[str, tuple[PlanChange, ...]] = field(default_factory=dict)
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    scaling: Scaling = "strong"


def parse_axes(
    workload: str,
    lists: Mapping[str, str | None],
    *,
    common: Plan,
    parameters: tuple[str, ...] = (),
    scaling: str = "strong",
) -> GridAxes:
    """Parse the axes of a command line.

    ``lists`` maps names of ``LIST_AXES`` to comma-separated lists, None if not given. ``parameters``
    are ``name=1,2,3``. Raises UsageError, or UnknownValue (closest first), for a wrong value.
    """
    if scaling not in SCALINGS:
        raise UnknownValue("scaling", scaling, SCALINGS)
    given = {name: text for name, text in lists.items() if text is not None}
    return GridAxes(
        workload=Workload.parse(workload),
        common=common,
        changes={name: _parse_list(name, text, common.device) for name, text in given.items()},
        parameters=_parse_parameters(parameters),
        scaling="weak" if scaling == "weak" else "strong",
    )


def _parse_list(name: str, text: str, device: str | None) -> tuple[PlanChange, ...]:
    if name == "devices":
        return _entries(name, text, lambda entry: _parse_devices(entry, device))
    if name in CHOICE_AXES:
        return _entries(name, text, lambda entry: {name: _parse_choice(name, entry)})
    if name in INTEGER_AXES:
        least = MINIMUM_VALUES[name]
        return _entries(name, text, lambda entry: {name: _parse_integer(name, least, entry)})
    raise UnknownValue("axis", name, LIST_AXES)


def _entries(name: str, text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entries):
        raise UsageError(
            f"{name} {text!r} has an empty entry; next: --{name.replace('_', '-')} a,b,c"
        )
    return tuple(read(entry) for entry in dict.fromkeys(entries))


def _parse_choice(name: str, entry: str) -> str:
    if entry not in ALLOWED_VALUES[name]:
        raise UnknownValue(name, entry, ALLOWED_VALUES[name])
    return entry


def _parse_integer(name: str, minimum: int, entry: str) -> int:
    if not entry.isascii() or not entry.isdigit() or int(entry) < minimum:
        raise UsageError(f"{name} {entry!r}: allowed are whole numbers from {minimum}")
    return int(entry)


def _parse_devices(entry: str, device: str | None) -> PlanChange:
    kind, count = parse_device_count(entry)
    if kind is None:
        return {"devices": count}
    if device not in (None, kind):
        raise UsageError(
            f"--devices {entry} conflicts with --device {device}; next: remove --device"
        )
    return {"device": kind, "devices": count}


def _parse_parameters(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, separator, values = text.partition("=")
        if not separator or not name:
            raise UsageError(f"parameter {text!r} is not NAME=INTEGER,...; next: filter=3,5,10")
        if name in found:
            raise UsageError(f"parameter {name!r} is given twice; next: one list, {name}=1,2")
        found[name] = _entries(name, values, partial(_parse_integer, name, 0))
    return found


# returns why a complete plan is not supported, or None
UnsupportedCheck = Callable[[Workload, Plan, Machine], str | None]
PlanCompletion = Callable[[Workload, Plan], Plan]  # returns the complete plan of a workload


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """A workload under a complete plan, and why it is not supported, if so.

    ``id`` is the cell id of its measurements. ``label`` names the cell within its grid.
    """

    id: str
    workload: Workload
    plan: Plan
    label: str
    unsupported_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Cells in the order of the axes. ``duplicates`` counts the cells that were merged."""

    cells: tuple[GridCell, ...]
    duplicates: int = 0


def build_grids(
    several: Sequence[GridAxes],
    machine: Machine,
    unsupported: UnsupportedCheck,
    complete: PlanCompletion | None = None,
) -> Grid:
    """Return every combination of the axes, resolved on ``machine``; equal cells are merged.

    A combination that is not supported is a cell with a reason. A CPU device has the same cores in
    all grids. Without ``complete`` plans are resolved by rule. Raises UsageError if no combination
    is supported, or none with some value of a workload parameter; DevicesMissing if the machine has
    too few devices.
    """

    def by_rule(workload: Workload, plan: Plan) -> Plan:
        return plan.resolve(machine, workloads.info(workload.name).defaults)

    cores = _cores_per_device(several, machine)
    builders = [
        _Builder(axes, machine, unsupported, cores, complete or by_rule) for axes in several
    ]
    found = [cell for builder in builders for cell in builder.cells()]
    refusals = [error for builder in builders for error in builder.refusals]
    if len(refusals) == len(found):
        raise refusals[0]
    unique: dict[str, GridCell] = {}
    for cell in found:
        unique.setdefault(cell.id, cell)
    cells = tuple(unique.values())
    named = cells if len(several) == 1 else _label_across_grids(cells, several)
    return Grid(cells=_add_step_to_labels(named), duplicates=len(found) - len(unique))


def _add_step_to_labels(cells: Sequence[GridCell]) -> tuple[GridCell, ...]:
    """Append the step mode to labels that occur more than once: it can follow from the strategy."""
    names = Counter((str(cell.workload), cell.label) for cell in cells)
    return tuple(
        dataclasses.replace(cell, label=f"{cell.label} · {cell.plan.step}")
        if names[str(cell.workload), cell.label] > 1
        else cell
        for cell in cells
    )


def _label_across_grids(
    cells: Sequence[GridCell], several: Sequence[GridAxes]
) -> tuple[GridCell, ...]:
    given = {name for axes in several for name in axes.changes} | {"batch"}
    names = [name for name in LIST_AXES if name in given]
    varying = [n for n in names if len({getattr(cell.plan, n) for cell in cells}) > 1]
    kinds = len({cell.plan.device for cell in cells}) > 1
    return tuple(
        dataclasses.replace(cell, label=_label(cell.workload, cell.plan, (), varying, kinds))
        for cell in cells
    )


def _cores_per_device(several: Sequence[GridAxes], machine: Machine) -> int:
    plans = [
        axes.common.edit(**_merge(changes))
        for axes in several
        for changes in _products(axes.changes)
    ]
    counts = [plan.devices or 1 for plan in plans if _device(plan, machine) == "cpu"]
    return max(1, machine.cores // max(counts, default=1))


def _device(plan: Plan, machine: Machine) -> str:
    return plan.device or ("cuda" if machine.gpus else "cpu")


@dataclass
class _Builder:
    """Builds one grid. ``refusals`` are the errors that became cells with a reason."""

    axes: GridAxes
    machine: Machine
    unsupported: UnsupportedCheck
    cores: int
    complete: PlanCompletion
    refusals: list[NfoldError] = field(default_factory=list)

    def cells(self) -> Iterator[GridCell]:
        for workload, reason in self._workloads():
            for changes in _products(self.axes.changes):
                yield self._cell(workload, _merge(changes), reason)

    def _workloads(self) -> list[tuple[Workload, str | None]]:
        parameters = self.axes.parameters
        base = workloads.with_fingerprint(self.axes.workload)
        found: list[tuple[Workload, UsageError | None]] = []
        for values in _products(parameters):
            workload = base.with_parameters(**dict(zip(parameters, values, strict=True)))
            found.append((workload, _refusal(workload)))
        groups = [found]
        for chosen in ((name, value) for name, values in parameters.items() for value in values):
            groups.append([one for one in found if chosen in one[0].parameters])
        for group in groups:
            errors = [error for _, error in group if error is not None]
            if len(errors) == len(group):
                raise errors[0]
        return [(workload, None if error is None else str(error)) for workload, error in found]

    def _cell(self, workload: Workload, changes: dict[str, Any], reason: str | None) -> GridCell:
        plan, refused = self._plan(workload, self.axes.common.edit(**changes))
        reason = reason or refused
        if reason is None:
            try:
                reason = self.unsupported(workload, plan, self.machine)
            except ExtraMissing as missing:
                self.refusals.append(missing)
                reason = str(missing)
        swept = _varying(self.axes.parameters)
        kinds = any("device" in change for change in self.axes.changes.get("devices", ()))
        return GridCell(
            id=cell_id(workload, plan, None, self.machine),
            workload=workload,
            plan=plan,
            label=_label(workload, plan, swept, _varying(self.axes.changes), kinds),
            unsupported_reason=reason,
        )

    def _plan(self, workload: Workload, plan: Plan) -> tuple[Plan, str | None]:
        if _device(plan, self.machine) == "cpu":
            plan = plan.edit(cores_per_device=self.cores)
        try:
            return self._scaled(self.complete(workload, plan)), None
        except UsageError as error:
            self.refusals.append(error)
            automatic = self.complete(workload, plan.edit(strategy=None))
            return self._scaled(automatic).edit(strategy=plan.strategy), str(error)

    def _scaled(self, plan: Plan) -> Plan:
        if self.axes.scaling == "strong":
            return plan
        return plan.edit(batch=(plan.batch or 1) * (plan.devices or 1))


def _label(
    workload: Workload, plan: Plan, swept: Sequence[str], varying: Sequence[str], kinds: bool
) -> str:
    chosen = dict(workload.parameters)
    labels = [_axis_label(name, plan, kinds) for name in varying]
    own = [f"{name} {chosen[name]}" for name in swept]
    return " · ".join([*own, *filter(None, labels)]) or str(workload)


def _axis_label(axis: str, plan: Plan, kinds: bool) -> str:
    value = getattr(plan, axis)
    if axis == "devices":
        kind = f"{plan.device} " if kinds else ""
        return f"{value} {kind}device{'' if value == 1 else 's'}"
    if axis == "strategy":
        return "" if value == "single" and plan.devices == 1 else str(value)
    return f"{axis} {value}" if isinstance(value, int) else str(value)


def _refusal(workload: Workload) -> UsageError | None:
    try:
        workloads.parameters(workload)
    except UsageError as error:
        return error
    return None


def _products(lists: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    return itertools.product(*lists.values())


def _varying(lists: Mapping[str, Sequence[Any]]) -> list[str]:
    return [name for name, values in lists.items() if len(values) > 1]


def _merge(changes: tuple[Mapping[str, Any], ...]) -> dict[str, Any]:
    return {name: value for change in changes for name, value in change.items()}
