"""Field report 2: the MNIST tutorial with MirroredStrategy on one device and several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil

from nfold.analysis import cell_labels, cells
from nfold.analysis.comparison import CellResult
from nfold.core.format import format_duration, format_ratio, join_words, pluralize
from nfold.fieldreports import sheets
from nfold.fieldreports.sheets import (
    NO_NUMBER_ENTRY,
    FieldReport,
    Sheet,
    SheetBuilder,
    SheetEntry,
    differing_self_explanatory_axes,
    interval_entry,
    number_entry,
    select_workloads,
)

HEADS = (
    *("", "devices", "batch (each)", "accuracy", "time"),
    *("steps", "ms/step", "images/s", "speedup"),
)


def mnist_report(found: Sequence[CellResult]) -> FieldReport:
    """Build the table of accuracy and time by framework, input, devices and batch per device."""
    mine = sorted(select_workloads(found, "mnist"), key=_order)
    sentences = [*_frameworks(mine), *_accuracies(mine)]
    return FieldReport(
        name="mirrored-mnist",
        title="The MNIST tutorial on one device and on several",
        published_setup=sheets.MNIST_SETUP,
        sentences=tuple(sentences),
        sheets=(_table(mine),),
    )


def _order(result: CellResult) -> tuple[str, str, int, int]:
    plan = result.plan
    return (plan.framework, plan.input or "", result.batch, result.devices)


def _table(mine: Sequence[CellResult]) -> Sheet:
    rows = SheetBuilder("Accuracy and time", HEADS)
    for devices, each, accuracy, seconds in sheets.MNIST_ROWS:
        rows.add(
            *("then: TensorFlow 1", devices, f"{devices * each:,} ({each})"),
            number_entry(accuracy, "{:.4f}".format),
            number_entry(seconds, format_duration),
            sheets.MNIST_STEPS,
            number_entry(1e3 * seconds / sheets.MNIST_STEPS),
            number_entry(devices * each * sheets.MNIST_STEPS / seconds),
        )
    for result in mine:
        rows.add(*_row(rows, result, _configuration(result, mine)))
    return rows.build()


def _row(rows: SheetBuilder, result: CellResult, who: str) -> list[SheetEntry | str | int]:
    batch = f"{result.batch:,} ({result.batch // result.devices})"
    if not result.succeeded:
        return [f"now: {who}", result.devices, batch, rows.failure_entry(result)]
    steps, seconds, speedup = _steps(result), result.training_s, result.speedup
    return [
        *(f"now: {who}", result.devices, batch),
        interval_entry(result.accuracy, 4),
        number_entry(seconds, format_duration),
        steps or NO_NUMBER_ENTRY,
        number_entry(1e3 * seconds / steps if seconds and steps else None),
        interval_entry(result.samples_per_s),
        SheetEntry(text=format_ratio(speedup.value), value=speedup) if speedup else "",
    ]


def _steps(result: CellResult) -> int:
    done = cells.epochs(result.cell.successful[0])
    return sum(ceil(epoch.samples / result.batch) for epoch in done)


def _configuration(result: CellResult, mine: Sequence[CellResult]) -> str:
    return cell_labels.cell_label(
        result.cell.first, ("framework", *differing_self_explanatory_axes(mine))
    )


def _frameworks(mine: Sequence[CellResult]) -> list[str]:
    names = dict.fromkeys(_configuration(result, mine) for result in mine)
    made = [_scaling(name, [r for r in mine if _configuration(r, mine) == name]) for name in names]
    return [sentence for sentence in made if sentence]


def _scaling(name: str, own: Sequence[CellResult]) -> str:
    compared = sorted((r.batch, r.devices, r.speedup.value) for r in own if r.speedup)
    if not compared:
        return ""
    most = max(devices for _, devices, _ in compared)
    batches = {r.batch for r in own if r.devices == 1}
    speedups = [
        f"{format_ratio(speedup)} at {batch // devices} per device "
        f"({'same global batch' if batch in batches else 'same batch per device'})"
        for batch, devices, speedup in compared
        if devices == most
    ]
    return f"{name}: {pluralize(most, 'device')} give a speedup of {join_words(speedups)}."


def _accuracies(mine: Sequence[CellResult]) -> list[str]:
    alike: dict[tuple[int, int], list[float]] = defaultdict(list)
    for result in mine:
        if result.accuracy is not None:
            alike[result.batch, _steps(result)].append(result.accuracy.value)
    return [
        f"The {len(known)} accuracies after {steps:,} steps of {batch:,} lie within "
        f"{100 * (max(known) - min(known)):.1f} points ({min(known):.4f} to {max(known):.4f})."
        for (batch, steps), known in sorted(alike.items())
        if len(known) > 1
    ]
