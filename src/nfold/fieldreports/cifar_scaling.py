"""Field report 4: CIFAR-10 by batch, devices, strategy and framework."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from nfold.analysis import cell_labels
from nfold.analysis.comparison import BASELINE_DIFFERENCES, CellResult
from nfold.core.format import NO_NUMBER, format_duration, format_number, format_ratio, pluralize
from nfold.core.stats import Interval
from nfold.fieldreports import sheets
from nfold.fieldreports.sheets import (
    BLANK_ENTRY,
    NO_NUMBER_ENTRY,
    FieldReport,
    Sheet,
    SheetBuilder,
    SheetEntry,
    device_counts,
    differing_self_explanatory_axes,
    select_workloads,
)

MODELS = ("cnn10", "wide_resnet")
CELL_FORMAT = "epoch 1 [s] / median of epochs 2+ [s] / total / accuracy"


def cifar_report(found: Sequence[CellResult]) -> FieldReport:
    """Build the tables of epochs by model, batch and configuration, with device counts across."""
    mine = select_workloads(found, *MODELS)
    return FieldReport(
        name="cifar-scaling",
        title="CIFAR-10 by batch, devices, strategy and framework",
        published_setup=sheets.CIFAR_SETUP,
        sentences=(*_lengths(mine), *_sentences(mine)),
        sheets=tuple(_tables(mine)),
    )


def _lengths(mine: Sequence[CellResult]) -> list[str]:
    lengths = sorted({r.plan.epochs for r in mine if r.plan.epochs} - {sheets.CIFAR_EPOCHS})
    if not lengths:
        return []
    epochs = ", ".join(map(str, lengths))
    return [f"Totals and accuracies: after {epochs} epochs now, {sheets.CIFAR_EPOCHS} then."]


def _tables(mine: Sequence[CellResult]) -> list[Sheet]:
    made = []
    for name in MODELS:
        results = select_workloads(mine, name)
        workloads = dict.fromkeys(str(r.cell.first.workload) for r in results)
        for place, workload in enumerate(workloads or {name: None}):
            own = [r for r in results if str(r.cell.first.workload) == workload]
            made.append(_table(workload, own, name if place == 0 else None))
    return made


def _table(workload: str, own: Sequence[CellResult], reported: str | None) -> Sheet:
    counts = sorted({1, 2, *device_counts(own)})
    rows = SheetBuilder(
        f"{workload}: {CELL_FORMAT}", ["batch", "", *(pluralize(n, "device") for n in counts)]
    )
    before = {batch for model, batch, _ in sheets.CIFAR_CELLS if model == reported}
    for batch in sorted(before | {r.batch for r in own}):
        if reported and batch in before:
            entries = [_reported(reported, batch, n) for n in counts]
            rows.add(batch, "then: PyTorch, dp", *entries)
        now = [r for r in own if r.batch == batch]
        for way, cells in _rows(now, differing_self_explanatory_axes(own) if own else ()).items():
            entries = [_measured_entry(rows, cells.get(n)) for n in counts]
            rows.add(batch, f"now: {way}", *entries)
    return rows.build()


def _rows(
    cells: Sequence[CellResult], differing: Sequence[str]
) -> dict[str, dict[int, CellResult]]:
    found: dict[str, dict[int, CellResult]] = {}
    for result in sorted(cells, key=_strategy_of):
        for way in _configurations(result, cells, differing):
            found.setdefault(way, {})[result.devices] = result
    return found


def _strategy_of(result: CellResult) -> tuple[str, str, int]:
    plan = result.plan
    return (plan.framework, plan.strategy or "", result.devices)


def _configurations(
    result: CellResult, cells: Sequence[CellResult], differing: Sequence[str]
) -> list[str]:
    fits = [
        other
        for other in cells
        if other.devices > 1 and set(result.plan.diff(other.plan)) <= {*BASELINE_DIFFERENCES}
    ]
    among = [result] if result.devices > 1 or not fits else fits
    return list(dict.fromkeys(_configuration(result, o.plan.strategy, differing) for o in among))


def _configuration(result: CellResult, strategy: str | None, differing: Sequence[str]) -> str:
    shown = cell_labels.cell_label(result.cell.first, differing)
    named = [result.plan.framework, "" if strategy == "single" else strategy, shown]
    return ", ".join(filter(None, named))


def _reported(name: str, batch: int, devices: int) -> SheetEntry:
    if (name, batch, devices) not in sheets.CIFAR_CELLS:
        return BLANK_ENTRY
    cell = sheets.CIFAR_CELLS[name, batch, devices]
    if cell is None:
        return SheetEntry(text="out of memory", value={"status": "oom"})
    return _numbers(*cell)


def _measured_entry(rows: SheetBuilder, result: CellResult | None) -> SheetEntry:
    if result is None:
        return BLANK_ENTRY
    if not result.succeeded:
        return rows.failure_entry(result)
    accuracy = result.accuracy.value if result.accuracy else None
    return _numbers(result.first_epoch_s, result.later_epochs_s, result.training_s, accuracy)


def _numbers(
    first: float | None, later: float | None, total: float | None, accuracy: float | None
) -> SheetEntry:
    if first is None and accuracy is None:
        return NO_NUMBER_ENTRY
    texts = [NO_NUMBER if s is None else format_number(s) for s in (first, later)]
    texts.append(NO_NUMBER if total is None else format_duration(total))
    texts.append(NO_NUMBER if accuracy is None else f"{accuracy:.4f}")
    value = {"epoch_1_s": first, "later_epochs_s": later, "total_s": total, "accuracy": accuracy}
    return SheetEntry(text=" / ".join(texts), value=value)


def _sentences(mine: Sequence[CellResult]) -> list[str]:
    found: list[str] = []
    for workload in dict.fromkeys(str(r.cell.first.workload) for r in mine):
        own = [r for r in mine if str(r.cell.first.workload) == workload]
        words = differing_self_explanatory_axes(own)
        most = max((r.devices for r in own if r.comparison), default=0)
        lines: dict[str, list[tuple[CellResult, Interval]]] = {}
        for result in sorted(own, key=lambda r: (*_strategy_of(r), r.batch)):
            if result.speedup is not None and result.devices == most:
                way = _configuration(result, result.plan.strategy, words)
                lines.setdefault(way, []).append((result, result.speedup))
        found += [_over_batches(workload, way, line) for way, line in lines.items()]
    return found


def _over_batches(workload: str, way: str, line: Sequence[tuple[CellResult, Interval]]) -> str:
    ends = line[:1] if len(line) == 1 else [line[0], line[-1]]
    speedups = " and ".join(f"{format_ratio(s.value)} one at batch {r.batch:,}" for r, s in ends)
    first = line[0][0]
    text = f"{workload}, {way}: {pluralize(first.devices, 'device')} are {speedups}"
    winning = list(takewhile(lambda one: _is_significant(one[1]), reversed(line)))
    if not winning:
        return f"{text}; at no batch is the speedup significant."
    batch = winning[-1][0].batch
    return f"{text}{f'; significantly faster from batch {batch:,} on' * (batch != first.batch)}."


def _is_significant(speedup: Interval) -> bool:
    return (speedup.value if speedup.low is None else speedup.low) > 1
