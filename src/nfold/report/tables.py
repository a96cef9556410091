"""The table of cells: what varies, what was measured, what failed, and the doubts about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from nfold.inert import inert
from nfold.measurement import Measurement
from nfold.report import axes
from nfold.report.columns import COLUMNS, MAIN, Column, Shown
from nfold.report.results import Result, results
from nfold.report.words import NOTHING, STATUS, count, listed, superscript
from nfold.summary import Cell

COMPACT_WIDTH = 100
"""A terminal's width in characters that a compact table keeps to where it can."""
GAP = 3
"""Characters between two columns of a terminal's table."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One number of a line, with the marks of the notes that touch it."""

    column: Column
    shown: Shown | None
    marks: tuple[int, ...] = ()

    @property
    def full(self) -> str:
        """Value, interval and marks."""
        return self._joined(f" ({self.shown.about})" if self.shown and self.shown.about else "")

    @property
    def compact(self) -> str:
        """Value, half width of the interval and marks."""
        return self._joined(f" {self.shown.spread}" if self.shown and self.shown.spread else "")

    def _joined(self, interval: str) -> str:
        return f"{self.shown.value if self.shown else NOTHING}{interval}{superscript(self.marks)}"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One cell: its values on the varying axes, and its numbers or why there are none."""

    result: Result
    places: tuple[str, ...]
    entries: tuple[Entry, ...]
    status: str = ""
    cause: str = ""
    marks: tuple[int, ...] = ()
    group: bool = False
    """``status`` is empty where any repeat is ok; ``marks`` belong to it. ``group`` tells that
    the batch, or what comes before it, is another one than in the line above.
    """


@dataclass(frozen=True, kw_only=True)
class Table:
    """The cells of one section. ``notes`` are numbered from 1, ``shared`` holds in all cells."""

    axes: tuple[str, ...]
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    shared: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


@dataclass
class Notes:
    """Footnotes while a table is made: the same text has the same number."""

    texts: list[str] = field(default_factory=list)

    def mark(self, text: str) -> int:
        """The number of a note, counted from 1."""
        text = inert(text)
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def table(found: Sequence[Result], *, causes_in_lines: bool = False) -> Table:
    """The table of cells whose numbers are ``found``; at least one.

    The cause of a failed cell is a note; ``causes_in_lines`` where its line has room for it.
    """
    cells = [result.cell for result in found]
    differing = axes.varying(cells)
    columns = tuple(c for c in COLUMNS if c.key == MAIN or any(c.show(r) for r in found))
    ordered = sorted(found, key=lambda result: _order(result, differing))
    notes = Notes()
    lines = [_line(result, differing, columns, notes, causes_in_lines) for result in ordered]
    return Table(
        axes=differing,
        columns=columns,
        lines=_grouped(lines),
        shared=tuple((name, inert(text)) for name, text in [*axes.shared(cells), *_repeats(cells)]),
        notes=tuple(notes.texts),
    )


def _order(result: Result, differing: Sequence[str]) -> tuple[tuple[bool, Any], ...]:
    """By the columns from left to right."""
    values = [axes.value(result.cell.first, axis) for axis in differing]
    return tuple((value is not None, value) for value in values)


def _grouped(lines: list[Line]) -> tuple[Line, ...]:
    """Mark where a new group of lines begins: one that differs in more than the devices."""
    keys = [_group(line.result) for line in lines]
    new = [False, *(now != before for before, now in pairwise(keys))]
    return tuple(replace(line, group=begins) for line, begins in zip(lines, new, strict=True))


def _group(result: Result) -> tuple[Any, ...]:
    kept = [axis for axis in axes.AXES if axis != "devices" and axis not in axes.FOLLOWS_DEVICES]
    return tuple(axes.value(result.cell.first, axis) for axis in kept)


def _repeats(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    most = max(len(cell.measurements) for cell in cells)
    return [("repeats", str(most))] if most > 1 else []


def _line(
    result: Result,
    differing: Sequence[str],
    columns: Sequence[Column],
    notes: Notes,
    cause_in_line: bool,
) -> Line:
    values = [axes.value(result.cell.first, axis) for axis in differing]
    told = result.ok or not cause_in_line
    touching = _touching(result, columns, notes, _failures(result) if told else [])
    worst = result.cell.worst
    return Line(
        result=result,
        places=tuple(NOTHING if value is None else inert(str(value)) for value in values),
        entries=tuple(_entry(result, column, touching) for column in columns),
        status="" if result.ok else STATUS[worst.status],
        cause="" if told or worst.cause is None else where(worst),
        marks=() if result.ok else tuple(sorted(touching.get(MAIN, set()))),
    )


def _entry(result: Result, column: Column, touching: dict[str, set[int]]) -> Entry:
    shown = column.show(result)
    marks = tuple(sorted(touching.get(column.key, set()))) if shown else ()
    return Entry(column=column, shown=shown, marks=marks)


def _touching(
    result: Result, columns: Sequence[Column], notes: Notes, failures: Sequence[str]
) -> dict[str, set[int]]:
    """The notes of a cell by the column that they touch."""
    marks: dict[str, set[int]] = {}
    for measurement in result.cell.measurements:
        for doubt in measurement.warnings:
            for key in _touched(doubt.kind, columns):
                marks.setdefault(key, set()).add(notes.mark(doubt.text))
    for text in failures:
        marks.setdefault(MAIN, set()).add(notes.mark(text))
    if result.comparison is not None and result.comparison.scaling == "weak":
        text = "weak scaling: compared with one device at its share of the batch"
        marks.setdefault("speedup", set()).add(notes.mark(text))
    return marks


def _touched(kind: str, columns: Sequence[Column]) -> list[str]:
    return [column.key for column in columns if kind in column.doubts] or [MAIN]


def _failures(result: Result) -> list[str]:
    """Why repeats failed: of some, how many; of all, the cause."""
    failed = result.failed
    if not failed or (not result.ok and failed[0].cause is None):
        return []
    if not result.ok:
        return [where(failed[0])]
    counted = Counter(STATUS[m.status] for m in failed)
    kinds = listed([f"{number} {status}" for status, number in counted.items()])
    causes = dict.fromkeys(where(m) for m in failed if m.cause)
    runs = count(len(result.cell.measurements), "run")
    return [f"of {runs} {kinds}" + "".join(f"; {cause}" for cause in causes)]


def where(measurement: Measurement) -> str:
    """The cause of a failure with its rank and step: ``rank 1, step 12: no memory``."""
    cause = measurement.cause
    if cause is None:
        return STATUS[measurement.status]
    places = [("rank", cause.rank), ("step", cause.step)]
    named = [f"{name} {value}" for name, value in places if value is not None]
    told = all(place in cause.text for place in named)
    prefix = "" if told or not named else f"{', '.join(named)}: "
    return inert(f"{prefix}{cause.text}")


def rows(cells: Sequence[Cell], *, compact: bool = False) -> tuple[list[str], list[list[str]]]:
    """The table of cells as headers and rows of text.

    Compact: short headers, and the least important columns left out until the table fits into
    ``COMPACT_WIDTH`` characters. What the marks in it say, ``notes`` lists; what is the same
    in all cells, ``shared``.
    """
    if not cells:
        return [], []
    made = table(results(cells))
    return narrow(made) if compact else flat(made)


def notes(cells: Sequence[Cell]) -> list[str]:
    """The notes that the marks of ``rows`` stand for, with their marks."""
    texts = table(results(cells)).notes if cells else ()
    return [f"{superscript((number,))} {text}" for number, text in enumerate(texts, start=1)]


def shared(cells: Sequence[Cell]) -> str:
    """What ``rows`` leaves out because all cells have it: ``framework torch · batch 128``."""
    pairs = table(results(cells)).shared if cells else ()
    return shared_text(pairs)


def shared_text(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values on one line."""
    return " · ".join(f"{name} {value}" for name, value in pairs)


def flat(made: Table, *, compact: bool = False) -> tuple[list[str], list[list[str]]]:
    """A table as headers and rows of text."""
    heads = [column.short if compact else column.head for column in made.columns]
    lines = [
        [*line.places, *(_flat_entry(line, entry, compact) for entry in line.entries)]
        for line in made.lines
    ]
    return [*map(axes.name, made.axes), *heads], lines


def _flat_entry(line: Line, entry: Entry, compact: bool) -> str:
    if line.status and entry.column.key == MAIN:
        return f"{line.status}{superscript(line.marks)}"
    return entry.compact if compact else entry.full


def narrow(made: Table) -> tuple[list[str], list[list[str]]]:
    """As ``flat`` and compact, without the lightest columns, one by one, until the rest fits."""
    heads, lines = flat(made, compact=True)
    first = len(made.axes)
    kept = list(range(len(heads)))
    lightest = sorted(range(len(made.columns)), key=lambda k: made.columns[k].weight)
    for place in lightest:
        if _width(heads, lines, kept) <= COMPACT_WIDTH or made.columns[place].key == MAIN:
            break
        kept.remove(first + place)
    return [heads[k] for k in kept], [[line[k] for k in kept] for line in lines]


def _width(heads: list[str], lines: list[list[str]], kept: list[int]) -> int:
    widths = [max(len(line[k]) for line in [heads, *lines]) for k in kept]
    return sum(widths) + GAP * (len(kept) - 1)
