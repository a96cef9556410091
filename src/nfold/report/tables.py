"""The table of cells: what varies, what was measured, what failed, with footnotes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from nfold.analysis import cell_labels
from nfold.analysis.cell_labels import Footnotes, failure_location
from nfold.analysis.cells import Cell
from nfold.analysis.comparison import CellResult
from nfold.core.format import (
    NO_NUMBER,
    STATUS_LABELS,
    format_bytes,
    format_duration,
    format_half_width,
    format_number,
    format_percent,
    format_range,
    format_ratio,
    join_words,
    pluralize,
    scale_interval,
    superscript,
    terminal_safe,
)
from nfold.core.stats import Interval


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """One number of a row, and the numbers of its footnotes."""

    column: ResultColumn
    shown: FormattedValue | None
    marks: tuple[int, ...] = ()

    @property
    def full(self) -> str:
        """The value with its interval and footnotes."""
        return self._joined(f" ({self.shown.about})" if self.shown and self.shown.about else "")

    @property
    def compact(self) -> str:
        """The value with the half width of its interval and its footnotes."""
        return self._joined(f" {self.shown.spread}" if self.shown and self.shown.spread else "")

    def _joined(self, interval: str) -> str:
        return f"{self.shown.value if self.shown else NO_NUMBER}{interval}{superscript(self.marks)}"


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One cell: its values on the varying axes, its numbers, or its status if no repeat succeeded.

    ``group``: the batch, or an axis before it, differs from the row above.
    """

    result: CellResult
    places: tuple[str, ...]
    entries: tuple[TableEntry, ...]
    status: str = ""
    cause: str = ""
    marks: tuple[int, ...] = ()
    group: bool = False


@dataclass(frozen=True, kw_only=True)
class CellTable:
    """The cells of one section. Footnotes are numbered from 1; ``shared`` are equal in all cells."""

    axes: tuple[str, ...]
    columns: tuple[ResultColumn, ...]
    lines: tuple[TableRow, ...]
    shared: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def build_table(found: Sequence[CellResult], *, causes_in_lines: bool = False) -> CellTable:
    """Build the table of at least one cell.

    The cause of a failure is a footnote, or with ``causes_in_lines`` part of the row.
    """
    cells = [result.cell for result in found]
    differing = cell_labels.varying_axes(cells)
    columns = tuple(
        c for c in RESULT_COLUMNS if c.key == MAIN_COLUMN or any(c.format(r) for r in found)
    )
    ordered = sorted(found, key=lambda result: _order(result, differing))
    notes = Footnotes()
    lines = [_line(result, differing, columns, notes, causes_in_lines) for result in ordered]
    return CellTable(
        axes=differing,
        columns=columns,
        lines=_grouped(lines),
        shared=tuple(
            (name, terminal_safe(text))
            for name, text in [*cell_labels.shared_values(cells), *_repeats(cells)]
        ),
        notes=tuple(notes.texts),
    )


def _order(result: CellResult, differing: Sequence[str]) -> tuple[tuple[bool, Any], ...]:
    values = [cell_labels.axis_value(result.cell.first, axis) for axis in differing]
    return tuple((value is not None, value) for value in values)


def _grouped(lines: list[TableRow]) -> tuple[TableRow, ...]:
    keys = [_group(line.result) for line in lines]
    new = [False, *(now != before for before, now in pairwise(keys))]
    return tuple(replace(line, group=begins) for line, begins in zip(lines, new, strict=True))


def _group(result: CellResult) -> tuple[Any, ...]:
    kept = [
        axis
        for axis in cell_labels.CELL_AXES
        if axis != "devices" and axis not in cell_labels.DEVICE_DEPENDENT_AXES
    ]
    return tuple(cell_labels.axis_value(result.cell.first, axis) for axis in kept)


def _repeats(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    most = max(len(cell.measurements) for cell in cells)
    return [("repeats", str(most))] if most > 1 else []


def _line(
    result: CellResult,
    differing: Sequence[str],
    columns: Sequence[ResultColumn],
    notes: Footnotes,
    cause_in_line: bool,
) -> TableRow:
    values = [cell_labels.axis_value(result.cell.first, axis) for axis in differing]
    in_note = result.succeeded or not cause_in_line
    marks_by_column = _footnote_marks(result, columns, notes, _failures(result) if in_note else [])
    worst = result.cell.first_failed_or_first
    return TableRow(
        result=result,
        places=tuple(NO_NUMBER if value is None else terminal_safe(str(value)) for value in values),
        entries=tuple(_entry(result, column, marks_by_column) for column in columns),
        status="" if result.succeeded else STATUS_LABELS[worst.status],
        cause="" if in_note or worst.cause is None else failure_location(worst),
        marks=() if result.succeeded else tuple(sorted(marks_by_column.get(MAIN_COLUMN, set()))),
    )


def _entry(
    result: CellResult, column: ResultColumn, marks_by_column: dict[str, set[int]]
) -> TableEntry:
    shown = column.format(result)
    marks = tuple(sorted(marks_by_column.get(column.key, set()))) if shown else ()
    return TableEntry(column=column, shown=shown, marks=marks)


def _footnote_marks(
    result: CellResult, columns: Sequence[ResultColumn], notes: Footnotes, failures: Sequence[str]
) -> dict[str, set[int]]:
    marks: dict[str, set[int]] = {}
    for measurement in result.cell.measurements:
        for caveat in measurement.warnings:
            for key in _caveat_columns(caveat.kind, columns):
                marks.setdefault(key, set()).add(notes.mark(caveat.text))
    for text in failures:
        marks.setdefault(MAIN_COLUMN, set()).add(notes.mark(text))
    for caveat in result.comparison.caveats if result.comparison is not None else ():
        number = notes.mark(caveat.text)
        for key in _caveat_columns(caveat.kind, columns):
            marks.setdefault(key, set()).add(number)
    return marks


def _caveat_columns(kind: str, columns: Sequence[ResultColumn]) -> list[str]:
    return [column.key for column in columns if kind in column.caveat_kinds] or [MAIN_COLUMN]


def _failures(result: CellResult) -> list[str]:
    failed = result.failed_repeats
    if not failed or (not result.succeeded and failed[0].cause is None):
        return []
    if not result.succeeded:
        return [failure_location(failed[0])]
    counted = Counter(STATUS_LABELS[m.status] for m in failed)
    kinds = join_words([f"{number} {status}" for status, number in counted.items()])
    causes = dict.fromkeys(failure_location(m) for m in failed if m.cause)
    runs = pluralize(len(result.cell.measurements), "run")
    return [f"of {runs}: {kinds}" + "".join(f"; {cause}" for cause in causes)]


def shared_text(pairs: Sequence[tuple[str, str]]) -> str:
    """Join names and values: ``framework torch · batch 128``."""
    return " · ".join(f"{name} {value}" for name, value in pairs)


def flatten_table(made: CellTable, *, compact: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of text."""
    heads = [column.short if compact else column.head for column in made.columns]
    lines = [
        [*line.places, *(_flat_entry(line, entry, compact) for entry in line.entries)]
        for line in made.lines
    ]
    return [*map(cell_labels.axis_name, made.axes), *heads], lines


def _flat_entry(line: TableRow, entry: TableEntry, compact: bool) -> str:
    if line.status and entry.column.key == MAIN_COLUMN:
        return f"{line.status}{superscript(line.marks)}"
    return entry.compact if compact else entry.full


@dataclass(frozen=True, kw_only=True)
class FormattedValue:
    """A number as text; ``about`` is its interval in full, ``spread`` its half width."""

    value: str
    about: str = ""
    spread: str = ""


@dataclass(frozen=True, kw_only=True)
class ResultColumn:
    """One column of numbers.

    A narrow screen drops the columns of the smallest ``weight`` first. ``spans``: the reason of a
    failed cell may cover this column. ``caveat_kinds``: warnings that concern this number rather than
    the throughput.
    """

    key: str
    head: str
    short: str
    format: Callable[[CellResult], FormattedValue | None]
    weight: int
    spans: bool = True
    caveat_kinds: tuple[str, ...] = ()


def _seconds(seconds: float | None) -> FormattedValue | None:
    return None if seconds is None else FormattedValue(value=format_number(seconds))


def _with_bounds(interval: Interval | None, places: int | None = None) -> FormattedValue | None:
    if interval is None:
        return None
    return FormattedValue(
        value=format_number(interval.value, places),
        about=format_range(interval, places),
        spread=format_half_width(interval, places),
    )


def _training(result: CellResult) -> FormattedValue | None:
    seconds = result.training_s
    return None if seconds is None else FormattedValue(value=format_duration(seconds))


def _speedup(result: CellResult) -> FormattedValue | None:
    if result.comparison is None:
        return FormattedValue(value="1") if result.is_baseline else None
    speedup = result.comparison.speedup
    return FormattedValue(
        value=format_ratio(speedup.value),
        about=format_range(speedup, 2),
        spread=format_half_width(speedup, 2),
    )


def _efficiency(result: CellResult) -> FormattedValue | None:
    if result.comparison is None:
        return None
    efficiency = result.comparison.efficiency
    in_percent = scale_interval(efficiency, 100)
    return FormattedValue(value=format_percent(efficiency.value), about=format_range(in_percent, 0))


def _memory(result: CellResult) -> FormattedValue | None:
    held = result.peak_memory_bytes
    return None if held is None else FormattedValue(value=format_bytes(held))


RESULT_COLUMNS = (
    ResultColumn(
        key="first_epoch_s",
        head="epoch 1 [s]",
        short="epoch 1 [s]",
        format=lambda r: _seconds(r.first_epoch_s),
        weight=3,
    ),
    ResultColumn(
        key="later_epochs_s",
        head="median of epochs 2+ [s]",
        short="epochs 2+ [s]",
        format=lambda r: _seconds(r.later_epochs_s),
        weight=5,
    ),
    ResultColumn(
        key="training_s", head="training time", short="training", format=_training, weight=4
    ),
    ResultColumn(
        key="accuracy",
        head="accuracy",
        short="accuracy",
        format=lambda r: _with_bounds(r.accuracy, 4),
        weight=6,
        caveat_kinds=("parameters_differ",),
    ),
    ResultColumn(
        key="samples_per_s",
        head="images/s",
        short="images/s",
        format=lambda r: _with_bounds(r.samples_per_s),
        weight=10,
    ),
    ResultColumn(
        key="speedup",
        head="speedup",
        short="speedup",
        format=_speedup,
        weight=9,
        caveat_kinds=("weak_scaling", "different_workers", "superlinear"),
    ),
    ResultColumn(
        key="efficiency",
        head="efficiency",
        short="efficiency",
        format=_efficiency,
        weight=8,
        caveat_kinds=("superlinear",),
    ),
    ResultColumn(
        key="peak_memory_bytes",
        head="peak memory",
        short="memory",
        format=_memory,
        weight=2,
        spans=False,
    ),
    ResultColumn(
        key="joules_per_1000",
        head="J per 1,000 samples",
        short="J/1,000",
        format=lambda r: _seconds(r.joules_per_1000),
        weight=1,
        spans=False,
    ),
)

# always shown; carries failures, and warnings without a column of their own
MAIN_COLUMN = "samples_per_s"
