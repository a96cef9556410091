"""The table of cells: what varies, what was measured, what failed, with footnotes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from nfold.analysis import cell_labels
from nfold.analysis.cell_labels import Footnotes, failure_location
from nfold.analysis.comparison import CellResult
from nfold.analysis.part_timings import BASELINE_COLUMN, PartTiming
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


@dataclass(frozen=True)
class TableEntry:
    """One number as text, and the numbers of its footnotes; ``value`` is empty without a number.

    ``about`` is its interval in full, ``spread`` the half width, ``rate`` its throughput.
    """

    value: str = ""
    about: str = ""
    spread: str = ""
    rate: str = ""
    marks: tuple[int, ...] = ()

    def text(self, *, compact: bool) -> str:
        """Return the value with its interval and footnotes; ``compact``: with the half width."""
        full = f"{self.about and f' ({self.about})'}{self.rate and f' · {self.rate}'}"
        more = self.spread and f" {self.spread}" if compact else full
        return f"{self.value or NO_NUMBER}{more}{superscript(self.marks)}"


@dataclass(frozen=True)
class ResultColumn:
    """One column of numbers, by the attribute of a result.

    A narrow screen drops the columns of the smallest ``weight`` first. ``caveat_kinds``: warnings
    that concern this number rather than the throughput. ``spans``: the reason of a failed cell may
    cover this column. ``baseline`` is the text of a baseline without this number.
    """

    key: str
    head: str
    short: str
    weight: int
    form: Callable[[Any], TableEntry]
    caveat_kinds: tuple[str, ...] = ()
    spans: bool = True
    baseline: str = ""

    def entry(self, result: CellResult) -> TableEntry:
        value = getattr(result, self.key)
        if value is None:
            return TableEntry(self.baseline if result.is_baseline else "")
        return self.form(value)


def _plain(form: Callable[[Any], str]) -> Callable[[Any], TableEntry]:
    return lambda value: TableEntry(form(value))


def _with_bounds(interval: Interval, places: int | None = None) -> TableEntry:
    spread = format_half_width(interval, places)
    value = format_number(interval.value, places)
    return TableEntry(value, format_range(interval, places), spread)


def _speedup(speedup: Interval) -> TableEntry:
    return replace(_with_bounds(speedup, 2), value=format_ratio(speedup.value))


def _efficiency(efficiency: Interval) -> TableEntry:
    about = format_range(scale_interval(efficiency, 100), 0)
    return TableEntry(format_percent(efficiency.value), about)


SPEEDUP_CAVEATS = ("weak_scaling", "different_workers", "superlinear")
# always shown; carries failures, and warnings without a column of their own
MAIN_COLUMN = "samples_per_s"
NUMBER, BYTES = _plain(format_number), _plain(format_bytes)
RESULT_COLUMNS = (
    ResultColumn("first_epoch_s", "epoch 1 [s]", "epoch 1 [s]", 3, NUMBER),
    ResultColumn("later_epochs_s", "median of epochs 2+ [s]", "epochs 2+ [s]", 5, NUMBER),
    ResultColumn("training_s", "training time", "training", 4, _plain(format_duration)),
    ResultColumn(
        "accuracy",
        "accuracy",
        "accuracy",
        6,
        partial(_with_bounds, places=4),
        ("parameters_differ",),
    ),
    ResultColumn(MAIN_COLUMN, "images/s", "images/s", 10, _with_bounds),
    ResultColumn("speedup", "speedup", "speedup", 9, _speedup, SPEEDUP_CAVEATS, baseline="1"),
    ResultColumn("efficiency", "efficiency", "efficiency", 8, _efficiency, ("superlinear",)),
    ResultColumn("peak_memory_bytes", "peak memory", "memory", 2, BYTES, spans=False),
    ResultColumn("joules_per_1000", "J per 1,000 samples", "J/1,000", 1, NUMBER, spans=False),
)


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

    def order(result: CellResult) -> tuple[tuple[bool, Any], ...]:
        values = [cell_labels.axis_value(result.cell.first, axis) for axis in differing]
        return tuple((value is not None, value) for value in values)

    cells = [result.cell for result in found]
    differing = cell_labels.varying_axes(cells)
    columns = [
        c for c in RESULT_COLUMNS if c.key == MAIN_COLUMN or any(c.entry(r).value for r in found)
    ]
    ordered = sorted(found, key=order)
    notes = Footnotes()
    lines = [_line(result, differing, columns, notes, causes_in_lines) for result in ordered]
    begins = [False, *(_group(above) != _group(below) for above, below in pairwise(ordered))]
    most = max(len(cell.measurements) for cell in cells)
    repeats = [("repeats", str(most))] if most > 1 else []
    return CellTable(
        axes=differing,
        columns=tuple(columns),
        lines=tuple(replace(line, group=new) for line, new in zip(lines, begins, strict=True)),
        shared=tuple(
            (name, terminal_safe(text))
            for name, text in [*cell_labels.shared_values(cells), *repeats]
        ),
        notes=tuple(notes.texts),
    )


def _group(result: CellResult) -> list[Any]:
    free = ("devices", *cell_labels.DEVICE_DEPENDENT_AXES)
    kept = [axis for axis in cell_labels.CELL_AXES if axis not in free]
    return [cell_labels.axis_value(result.cell.first, axis) for axis in kept]


def _line(
    result: CellResult,
    differing: Sequence[str],
    columns: Sequence[ResultColumn],
    notes: Footnotes,
    cause_in_line: bool,
) -> TableRow:
    values = [cell_labels.axis_value(result.cell.first, axis) for axis in differing]
    in_note = result.succeeded or not cause_in_line
    marks = _footnote_marks(result, columns, notes, _failures(result) if in_note else [])
    shown = [(column.key, column.entry(result)) for column in columns]
    worst = result.cell.first_failed_or_first
    return TableRow(
        result=result,
        places=tuple(NO_NUMBER if value is None else terminal_safe(str(value)) for value in values),
        entries=tuple(
            replace(entry, marks=tuple(sorted(marks[key])) if entry.value else ())
            for key, entry in shown
        ),
        status="" if result.succeeded else STATUS_LABELS[worst.status],
        cause="" if in_note or worst.cause is None else failure_location(worst),
        marks=() if result.succeeded else tuple(sorted(marks[MAIN_COLUMN])),
    )


def _footnote_marks(
    result: CellResult, columns: Sequence[ResultColumn], notes: Footnotes, failures: Sequence[str]
) -> dict[str, set[int]]:
    marks: dict[str, set[int]] = defaultdict(set)
    own = [(caveat.kind, caveat.text) for m in result.cell.measurements for caveat in m.warnings]
    compared = result.comparison.caveats if result.comparison is not None else ()
    others = [(caveat.kind, caveat.text) for caveat in compared]
    for kind, text in [*own, *(("", text) for text in failures), *others]:
        number = notes.mark(text)
        concerned = [column.key for column in columns if kind in column.caveat_kinds]
        for key in concerned or [MAIN_COLUMN]:
            marks[key].add(number)
    return marks


def _failures(result: CellResult) -> list[str]:
    failed = [m for m in result.cell.measurements if m.status != "ok"]
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

    def text(line: TableRow, column: ResultColumn, entry: TableEntry) -> str:
        if line.status and column.key == MAIN_COLUMN:
            return f"{line.status}{superscript(line.marks)}"
        return entry.text(compact=compact)

    heads = [column.short if compact else column.head for column in made.columns]
    lines = [
        [
            *line.places,
            *(text(line, *pair) for pair in zip(made.columns, line.entries, strict=True)),
        ]
        for line in made.lines
    ]
    return [*map(cell_labels.axis_name, made.axes), *heads], lines


@dataclass(frozen=True, kw_only=True)
class PartsTable:
    """Parts of an operation by device count; ``baselines`` have one entry per part."""

    columns: tuple[str, ...]
    parts: tuple[tuple[str, tuple[TableEntry, ...]], ...]
    baselines: tuple[tuple[str, TableEntry], ...]
    notes: tuple[str, ...]


def parts_table(found: Sequence[PartTiming]) -> PartsTable | None:
    """Build the table of parts, with CPU baselines; None without timings."""
    if not found:
        return None
    notes = Footnotes()
    columns = tuple(dict.fromkeys(t.column for t in found if not t.baseline))
    names = tuple(dict.fromkeys(t.part for t in found if not t.baseline))
    at = {(t.part, t.column): _part_entry(t, notes) for t in found if not t.baseline}
    return PartsTable(
        columns=columns,
        parts=tuple(
            (name, tuple(at.get((name, column), TableEntry()) for column in columns))
            for name in names
        ),
        baselines=tuple((t.part, _part_entry(t, notes)) for t in found if t.baseline),
        notes=tuple(notes.texts),
    )


def _part_entry(timing: PartTiming, notes: Footnotes) -> TableEntry:
    moved = timing.bytes_per_s
    rate = "" if moved is None else f"{format_number(moved / 1e9)} GB/s"
    marks = tuple(notes.mark(text) for text in timing.notes)
    return replace(_with_bounds(timing.ms), rate=rate, marks=marks)


def flatten_parts_table(
    made: PartsTable, *, compact: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of text, baselines in the first column."""
    blank = [""] * (len(made.columns) - 1)
    rows = [[name, *(one.text(compact=compact) for one in row)] for name, row in made.parts]
    rows += [[name, entry.text(compact=compact), *blank] for name, entry in made.baselines]
    return ["part [ms]", *(made.columns or (BASELINE_COLUMN,))], rows
