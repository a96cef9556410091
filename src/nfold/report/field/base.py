"""What a field report's page is made of: tables of entries, sentences, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nfold.inert import terminal_safe
from nfold.plain import serialize
from nfold.report import axes
from nfold.report.results import CellResult
from nfold.report.tables import Footnotes, failure_location
from nfold.report.words import (
    NO_NUMBER,
    STATUS_LABELS,
    format_half_width,
    format_number,
    superscript,
)
from nfold.stats import Interval

Parameters = dict[str, int]
_NUMBER = (int, float, Interval)


@dataclass(frozen=True, kw_only=True)
class SheetEntry:
    """What stands in one place of a table; ``value`` is its number, where the text rounds one."""

    text: str
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table of a field report; every row has an entry for each of ``heads``."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[SheetEntry, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def texts(self) -> list[list[str]]:
        """The rows as text."""
        return [[entry.text for entry in row] for row in self.rows]

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold one number an entry: they stand on the right."""
        columns = zip(*self.rows, strict=True)
        return [any(isinstance(e.value, _NUMBER) for e in column) for column in columns]


@dataclass(frozen=True, kw_only=True)
class FieldReport:
    """A field report's tables with today's numbers, and what these say in computed sentences.

    ``then`` says what the numbers of then were measured with.
    """

    name: str
    title: str
    published_setup: str
    sentences: tuple[str, ...]
    sheets: tuple[Sheet, ...]

    def to_json(self) -> dict[str, Any]:
        """``report`` of the versioned JSON: rows by the heads of their columns, unrounded."""
        return {
            "name": self.name,
            "title": self.title,
            "then": self.published_setup,
            "sentences": list(self.sentences),
            "tables": [_sheet_json(sheet) for sheet in self.sheets],
        }


def _sheet_json(sheet: Sheet) -> dict[str, Any]:
    rows = [
        {head: _plain(entry) for head, entry in zip(sheet.heads, row, strict=True)}
        for row in sheet.rows
    ]
    return {"title": sheet.title, "rows": rows, "notes": list(sheet.notes)}


def _plain(entry: SheetEntry) -> Any:
    if entry.value is not None:
        return serialize(entry.value)
    return None if entry.text in ("", NO_NUMBER) else entry.text


NO_NUMBER_ENTRY = SheetEntry(text=NO_NUMBER)
BLANK_ENTRY = SheetEntry(text="")


def text_entry(text: object) -> SheetEntry:
    """A text, or a whole number as it is."""
    whole = isinstance(text, int)
    return SheetEntry(
        text=f"{text:,}" if whole else terminal_safe(str(text)), value=text if whole else None
    )


def number_entry(value: float | None, places: int | None = None) -> SheetEntry:
    """A number, rounded for the eye; nothing where there is none."""
    return (
        NO_NUMBER_ENTRY
        if value is None
        else SheetEntry(text=format_number(value, places), value=value)
    )


def interval_entry(
    interval: Interval | None, places: int | None = None, unit: str = ""
) -> SheetEntry:
    """A number with the half width of its interval."""
    if interval is None:
        return NO_NUMBER_ENTRY
    spread = format_half_width(interval, places)
    text = f"{format_number(interval.value, places)}{unit}{f' {spread}' if spread else ''}"
    return SheetEntry(text=text, value=interval)


@dataclass
class SheetBuilder:
    """A sheet while it is made; the reason of a failed cell becomes a note."""

    title: str
    heads: Sequence[str]
    _rows: list[tuple[SheetEntry, ...]] = field(default_factory=list)
    _notes: Footnotes = field(default_factory=Footnotes)

    def add(self, *entries: SheetEntry) -> None:
        """One row; the places that are left out at its end are blank."""
        missing = len(self.heads) - len(entries)
        self._rows.append((*entries, *[BLANK_ENTRY] * missing))

    def failure_entry(self, result: CellResult) -> SheetEntry:
        """Stands where a cell has no number: its status, and a note with the reason."""
        worst = result.cell.first_failed_or_first
        cause = failure_location(worst)
        mark = superscript((self._notes.mark(cause),)) if worst.cause else ""
        return SheetEntry(
            text=f"{STATUS_LABELS[worst.status]}{mark}",
            value={"status": worst.status, "cause": cause},
        )

    def build(self) -> Sheet:
        """The finished table."""
        marked = [f"{superscript((k,))} {t}" for k, t in enumerate(self._notes.texts, start=1)]
        return Sheet(
            title=self.title, heads=tuple(self.heads), rows=tuple(self._rows), notes=tuple(marked)
        )


def select_workloads(found: Iterable[CellResult], *names: str) -> list[CellResult]:
    """The cells of some workloads, whatever their parameters."""
    return [result for result in found if result.cell.first.workload.name in names]


def workload_parameters(result: CellResult) -> Parameters:
    """The workload's parameters that are not at their defaults."""
    return dict(result.cell.first.workload.parameters)


def device_counts(found: Iterable[CellResult]) -> list[int]:
    """How many devices there are cells of."""
    return sorted({result.devices for result in found})


def differing_axes(found: Sequence[CellResult]) -> list[str]:
    """The axes that differ between cells of the same framework.

    What a framework alone decides (its own layout, its own way to run a step) needs no word.
    """
    frameworks = dict.fromkeys(result.plan.framework for result in found)
    groups = [[r.cell for r in found if r.plan.framework == name] for name in frameworks]
    named = {axis for group in groups if len(group) > 1 for axis in axes.varying_axes(group)}
    return [axis for axis in axes.CELL_AXES if axis in named]


def differing_self_explanatory_axes(found: Sequence[CellResult]) -> list[str]:
    """Those of them whose values say what they are."""
    return [
        a
        for a in differing_axes(found)
        if a in axes.SELF_EXPLANATORY_AXES and a not in ("framework", "device")
    ]
