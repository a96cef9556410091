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
        rows.add(f"then: distortion on {place}", "32", *entries)
    for group in groups:
        entries = [_measured_entry(rows, group.cells.get(n)) for n in counts]
        rows.add(f"now: {_configuration(group, mine)}", group.batch, *entries)
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
    decode = f"decode on {first.plan.decode}"
    named = [decode if a == "decode" else cell_labels.cell_label(first, [a]) for a in others]
    return " · ".join([f"distortion on {first.plan.augment}", *filter(None, named)])


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
    scaled = [
        (rate.value, speedup, group)
        for group in groups
        if (speedup := group.largest.speedup) and (rate := group.largest.samples_per_s)
    ]
    scaled.sort(key=lambda one: one[0])
    ends = [("slowest", *scaled[0])] if scaled else []
    ends += [("fastest", *scaled[-1])] if len(scaled) > 1 else []
    return [
        f"The {word} on {pluralize(group.largest.devices, 'device')}, "
        f"{_configuration(group, mine)}: {format_ratio(speedup.value)} one device."
        for word, _, speedup, group in ends
    ]
