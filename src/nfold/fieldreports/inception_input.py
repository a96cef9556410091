"""Field report 3: image distortion on the CPU or on the device."""

from __future__ import annotations

from collections.abc import Sequence

from nfold.analysis import cell_labels, cells
from nfold.analysis.comparison import CellResult, throughput_ratio
from nfold.core.format import format_number, format_range, format_ratio, pluralize
from nfold.fieldreports import sheets
from nfold.fieldreports.sheets import (
    BLANK_ENTRY,
    GROUP_DIFFERENCES,
    NO_NUMBER_ENTRY,
    DeviceGroup,
    FieldReport,
    Sheet,
    SheetBuilder,
    SheetEntry,
    device_counts,
    differing_axes,
    group_by_batch,
    select_workloads,
    text_entry,
)


def inception_report(found: Sequence[CellResult]) -> FieldReport:
    """Build the table of images/s and s/batch by device of the distortion."""
    mine = select_workloads(found, "inception_v3")
    groups = group_by_batch(mine)
    sentences = [*_placements(mine, groups), *_scalings(mine, groups)]
    return FieldReport(
        name="inception-input",
        title="Inception-v3 with its distortions on the CPU and on the device",
        published_setup=sheets.INCEPTION_SETUP,
        sentences=tuple(sentences),
        sheets=(_table(mine, groups),),
    )


def _table(mine: Sequence[CellResult], groups: Sequence[DeviceGroup]) -> Sheet:
    counts = sorted({1, 2, *device_counts(mine)})
    heads = ["", "batch", *(pluralize(n, "device") for n in counts)]
    rows = SheetBuilder("images/s, s/batch", heads)
    for place in ("cpu", "device"):
        reported = [sheets.INCEPTION_RATES.get((place, n)) for n in counts]
        entries = [_reported(*pair) if pair else BLANK_ENTRY for pair in reported]
        rows.add(text_entry(f"then: distortion on {place}"), text_entry("32"), *entries)
    for group in groups:
        entries = [_measured_entry(rows, group.cells.get(n)) for n in counts]
        rows.add(
            text_entry(f"now: {_configuration(group, mine)}"), text_entry(group.batch), *entries
        )
    return rows.build()


def _reported(rates: tuple[float, float], batches: tuple[float, float]) -> SheetEntry:
    seconds = "–".join(f"{s:.2f}" for s in dict.fromkeys(batches))
    return SheetEntry(
        text=f"{rates[0]}–{rates[1]}, {seconds}",
        value={"samples_per_s": list(rates), "s_per_batch": list(batches)},
    )


def _measured_entry(rows: SheetBuilder, result: CellResult | None) -> SheetEntry:
    if result is None:
        return BLANK_ENTRY
    rate = result.samples_per_s
    if not result.succeeded:
        return rows.failure_entry(result)
    if rate is None:
        return NO_NUMBER_ENTRY
    step = cells.step_ms(result.cell)
    seconds = step.value / 1e3 if step else result.batch / rate.value
    return SheetEntry(
        text=f"{format_number(rate.value)}, {format_number(seconds)}",
        value={"samples_per_s": rate, "s_per_batch": seconds},
    )


def _configuration(group: DeviceGroup, mine: Sequence[CellResult]) -> str:
    first = group.smallest.cell.first
    others = [axis for axis in differing_axes(mine) if axis not in ("augment", *GROUP_DIFFERENCES)]
    named = " · ".join(
        _name_axis_value(first.plan, axis, cell_labels.cell_label(first, [axis])) for axis in others
    )
    where = f"distortion on {first.plan.augment}"
    return f"{where} · {named}" if named else where


def _name_axis_value(plan: object, axis: str, label: str) -> str:
    return f"{axis} on {getattr(plan, axis)}" if axis == "decode" else label


def _placements(mine: Sequence[CellResult], groups: Sequence[DeviceGroup]) -> list[str]:
    found = []
    for group in groups:
        other = next((one for one in groups if _is_counterpart(group, one)), None)
        if group.smallest.plan.augment != "device" or other is None:
            continue
        for n in sorted(group.cells.keys() & other.cells.keys()):
            ratio = throughput_ratio(group.cells[n].cell, other.cells[n].cell)
            if ratio is not None:
                interval = f" ({format_range(ratio, 2)})" if format_range(ratio) else ""
                found.append(
                    f"{_configuration(group, mine)}, batch {group.batch}, {pluralize(n, 'device')}: "
                    f"{format_ratio(ratio.value)}{interval} the images/s with it on the CPU."
                )
    return found


def _is_counterpart(group: DeviceGroup, other: DeviceGroup) -> bool:
    differing = set(group.smallest.plan.diff(other.smallest.plan)) - {"workers"}
    return differing == {"augment"} and group.smallest.cell.first.workload == (
        other.smallest.cell.first.workload
    )


def _scalings(mine: Sequence[CellResult], groups: Sequence[DeviceGroup]) -> list[str]:
    scaled = [g for g in groups if g.largest.comparison is not None and g.largest.samples_per_s]
    if not scaled:
        return []
    ends = sorted(
        scaled, key=lambda g: g.largest.samples_per_s.value if g.largest.samples_per_s else 0.0
    )
    found = []
    for word, group in {"slowest": ends[0], "fastest": ends[-1]}.items():
        comparison = group.largest.comparison
        assert comparison is not None
        found.append(
            f"The {word} on {pluralize(group.largest.devices, 'device')}, {_configuration(group, mine)}: "
            f"{format_ratio(comparison.speedup.value)} one device."
        )
    return found if len(ends) > 1 else found[:1]
