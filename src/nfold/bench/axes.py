"""The axes of a grid: comma lists as a user writes them, read into values or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from nfold.errors import UnknownValue, UsageError
from nfold.plan import ALLOWED_VALUES, MINIMUM_VALUES, Plan
from nfold.workload import Workload

Scaling = Literal["strong", "weak"]
SCALINGS: tuple[str, ...] = get_args(Scaling)

CHOICE_AXES = (
    "framework",
    "layout",
    "precision",
    "strategy",
    "exchange",
    "batch_norm",
    "input",
    "decode",
    "cache",
    "augment",
    "step",
    "kernels",
    "allocation",
)
INTEGER_AXES = ("batch", "accumulate", "steps_per_execution", "workers", "seed")
LIST_AXES = ("devices", *CHOICE_AXES, *INTEGER_AXES)
"""Every plan field that takes a comma list."""

PlanChange = Mapping[str, Any]
"""Plan fields with the values that one entry of a list gives them."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GridAxes:
    """What a grid is the product of: ``changes`` of the ``common`` plan, workload parameters.

    ``changes`` maps an axis to its entries, ``parameters`` a workload's parameter to its
    values. Under ``weak`` scaling the batch is one device's.
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
    """The axes that a user wrote; UsageError or UnknownValue (closest first) for a wrong value.

    ``lists`` maps the names of ``LISTS`` to comma lists, None where nothing was said.
    ``parameters`` are ``name=1,2,3``.
    """
    if scaling not in SCALINGS:
        raise UnknownValue("scaling", scaling, SCALINGS)
    said = {name: text for name, text in lists.items() if text is not None}
    return GridAxes(
        workload=Workload.parse(workload),
        common=common,
        changes={name: _read_list(name, text, common.device) for name, text in said.items()},
        parameters=_read_parameters(parameters),
        scaling="weak" if scaling == "weak" else "strong",
    )


def _read_list(name: str, text: str, device: str | None) -> tuple[PlanChange, ...]:
    if name == "devices":
        return _entries(name, text, lambda entry: _place(entry, device))
    if name in CHOICE_AXES:
        return _entries(name, text, lambda entry: {name: _parse_choice(name, entry)})
    if name in INTEGER_AXES:
        return _entries(
            name, text, lambda entry: {name: _number(name, entry, MINIMUM_VALUES[name])}
        )
    raise UnknownValue("axis", name, LIST_AXES)


def _entries(name: str, text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    """The entries of a comma list in their order, each once."""
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


def _number(name: str, entry: str, minimum: int) -> int:
    if not entry.isascii() or not entry.isdigit() or int(entry) < minimum:
        raise UsageError(f"{name} {entry!r}: allowed are whole numbers from {minimum}")
    return int(entry)


def _place(entry: str, device: str | None) -> PlanChange:
    """``2`` is two devices of the chosen kind, ``cpu:2`` two CPU devices."""
    kind, separator, count = entry.rpartition(":")
    if not separator:
        return {"devices": _number("devices", entry, 1)}
    if kind not in ALLOWED_VALUES["device"]:
        raise UnknownValue("device", kind, ALLOWED_VALUES["device"])
    if device not in (None, kind):
        raise UsageError(
            f"devices {entry!r} against --device {device}: next: leave out --device, or {count}"
        )
    return {"device": kind, "devices": _number("devices", count, 1)}


def _read_parameters(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The parameters of a workload; the catalogue says whether it has them."""
    found: dict[str, tuple[int, ...]] = {}
    for name, values in map(_read_parameter, texts):
        if name in found:
            raise UsageError(f"parameter {name!r} is given twice; next: {name}=1,2")
        found[name] = values
    return found


def _read_parameter(text: str) -> tuple[str, tuple[int, ...]]:
    """``filter=3,5,10`` as a name and its values."""
    name, separator, values = text.partition("=")
    if not separator or not name:
        raise UsageError(f"parameter {text!r} is not NAME=INTEGER,...; next: filter=3,5,10")
    return name, _entries(name, values, lambda entry: _number(name, entry, 0))
