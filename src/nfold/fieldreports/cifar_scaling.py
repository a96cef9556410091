"""Field report 4: CIFAR-10 by batch, devices, strategy and framework."""

from __future__ import annotations

from collections.abc import Sequence

from nfold.analysis import cell_labels
from nfold.analysis.comparison import CellResult
from nfold.core.format import NO_NUMBER, format_duration, format_number, format_ratio, pluralize
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
    text_entry,
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
    named: dict[str, list[CellResult]] = {name: [] for name in MODELS}
    for result in mine:
        named[result.cell.first.workload.name].append(result)
    made = []
    for name, results in named.items():
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
            rows.add(text_entry(batch), text_entry("then: PyTorch, dp"), *entries)
        now = [r for r in own if r.batch == batch]
        for way, cells in _rows(now, differing_self_explanatory_axes(own) if own else ()).items():
            entries = [_measured_entry(rows, cells.get(n)) for n in counts]
            rows.add(text_entry(batch), text_entry(f"now: {way}"), *entries)
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
    if result.devices > 1:
        return [_configuration(result, result.plan.strategy, differing)]
    fits = [other for other in cells if other.devices > 1 and _same(result, other)]
    ways = dict.fromkeys(_configuration(result, other.plan.strategy, differing) for other in fits)
    return list(ways) or [_configuration(result, result.plan.strategy, differing)]


def _same(one: CellResult, other: CellResult) -> bool:
    free = {"devices", "strategy", "workers", "cores_per_device"}
    return set(one.plan.diff(other.plan)) <= free


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
    return _numbers(cell.first_s, cell.later_s, cell.total_s, cell.accuracy)


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
        lines: dict[str, list[CellResult]] = {}
        for result in sorted(own, key=lambda r: (*_strategy_of(r), r.batch)):
            if result.comparison is not None and result.devices == most:
                way = _configuration(result, result.plan.strategy, words)
                lines.setdefault(way, []).append(result)
        found += [_over_batches(workload, way, line) for way, line in lines.items()]
    return found


def _over_batches(workload: str, way: str, line: Sequence[CellResult]) -> str:
    ends = [line[0]] if len(line) == 1 else [line[0], line[-1]]
    speedups = " and ".join(f"{format_ratio(_speedup(r))} one at batch {r.batch:,}" for r in ends)
    text = f"{workload}, {way}: {pluralize(line[0].devices, 'device')} are {speedups}"
    winning = _winning_from(line)
    if winning is None:
        return f"{text}; at no batch is the speedup significant."
    return (
        f"{text}."
        if winning == line[0].batch
        else f"{text}; significantly faster from batch {winning:,} on."
    )


def _winning_from(line: Sequence[CellResult]) -> int | None:
    winning = None
    for result in reversed(line):
        comparison = result.comparison
        assert comparison is not None
        low = comparison.speedup.low
        if (comparison.speedup.value if low is None else low) <= 1:
            break
        winning = result.batch
    return winning


def _speedup(result: CellResult) -> float:
    assert result.comparison is not None
    return result.comparison.speedup.value
