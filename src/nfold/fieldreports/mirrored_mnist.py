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
    BLANK_ENTRY,
    NO_NUMBER_ENTRY,
    FieldReport,
    Sheet,
    SheetBuilder,
    SheetEntry,
    differing_self_explanatory_axes,
    interval_entry,
    number_entry,
    select_workloads,
    text_entry,
)

HEADS = (
    "",
    "devices",
    "batch (each)",
    "accuracy",
    "time",
    "steps",
    "ms/step",
    "images/s",
    "speedup",
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
    for row in sheets.MNIST_ROWS:
        batch = row.devices * row.batch_per_device
        rows.add(
            text_entry("then: TensorFlow 1"),
            text_entry(row.devices),
            text_entry(f"{batch:,} ({row.batch_per_device})"),
            number_entry(row.accuracy, 4),
            SheetEntry(text=format_duration(row.seconds), value=row.seconds),
            text_entry(sheets.MNIST_STEPS),
            number_entry(1e3 * row.seconds / sheets.MNIST_STEPS),
            number_entry(batch * sheets.MNIST_STEPS / row.seconds),
        )
    for result in mine:
        rows.add(*_row(rows, result, _configuration(result, mine)))
    return rows.build()


def _row(rows: SheetBuilder, result: CellResult, who: str) -> list[SheetEntry]:
    batch = text_entry(f"{result.batch:,} ({result.batch // result.devices})")
    first = [text_entry(f"now: {who}"), text_entry(result.devices), batch]
    if not result.succeeded:
        return [*first, rows.failure_entry(result)]
    steps, seconds = _steps(result), result.training_s
    return [
        *first,
        interval_entry(result.accuracy, 4),
        NO_NUMBER_ENTRY
        if seconds is None
        else SheetEntry(text=format_duration(seconds), value=seconds),
        text_entry(steps) if steps else NO_NUMBER_ENTRY,
        number_entry(1e3 * seconds / steps) if seconds and steps else NO_NUMBER_ENTRY,
        interval_entry(result.samples_per_s),
        _speedup(result),
    ]


def _speedup(result: CellResult) -> SheetEntry:
    if result.comparison is None:
        return BLANK_ENTRY
    return SheetEntry(
        text=f"{format_ratio(result.comparison.speedup.value)}", value=result.comparison.speedup
    )


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
    compared = [result for result in own if result.comparison is not None]
    if not compared:
        return ""
    most = max(result.devices for result in compared)
    batches = {r.batch for r in own if r.devices == 1}
    chosen = sorted((r for r in compared if r.devices == most), key=lambda r: r.batch)
    speedups = []
    for result in chosen:
        assert result.comparison is not None
        each = f"{result.batch // result.devices} per device"
        kept = "same global batch" if result.batch in batches else "same batch per device"
        speedups.append(f"{format_ratio(result.comparison.speedup.value)} at {each} ({kept})")
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
