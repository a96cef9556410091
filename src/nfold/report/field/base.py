"""What a field report's page is made of: tables of entries, sentences, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nfold.inert import inert
from nfold.plain import to_plain
from nfold.report import axes
from nfold.report.results import Result
from nfold.report.tables import Notes, where
from nfold.report.words import NOTHING, STATUS, half_width, number, superscript
from nfold.stats import Interval

Parameters = dict[str, int]
_NUMBER = (int, float, Interval)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What stands in one place of a table; ``value`` is its number, where the text rounds one."""

    text: str
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table of a field report; every row has an entry for each of ``heads``."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
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
    then: str
    sentences: tuple[str, ...]
    sheets: tuple[Sheet, ...]

    def to_json(self) -> dict[str, Any]:
        """``report`` of the versioned JSON: rows by the heads of their columns, unrounded."""
        return {
            "name": self.name,
            "title": self.title,
            "then": self.then,
            "sentences": list(self.sentences),
            "tables": [_sheet_json(sheet) for sheet in self.sheets],
        }


def _sheet_json(sheet: Sheet) -> dict[str, Any]:
    rows = [
        {head: _plain(entry) for head, entry in zip(sheet.heads, row, strict=True)}
        for row in sheet.rows
    ]
    return {"title": sheet.title, "rows": rows, "notes": list(sheet.notes)}


def _plain(entry: Entry) -> Any:
    if entry.value is not None:
        return to_plain(entry.value)
    return None if entry.text in ("", NOTHING) else entry.text


NONE = Entry(text=NOTHING)
BLANK = Entry(text="")


def told(text: object) -> Entry:
    """A text, or a whole number as it is."""
    whole = isinstance(text, int)
    return Entry(text=f"{text:,}" if whole else inert(str(text)), value=text if whole else None)


def amount(value: float | None, places: int | None = None) -> Entry:
    """A number, rounded for the eye; nothing where there is none."""
    return NONE if value is None else Entry(text=number(value, places), value=value)


def about(interval: Interval | None, places: int | None = None, unit: str = "") -> Entry:
    """A number with the half width of its interval."""
    if interval is None:
        return NONE
    spread = half_width(interval, places)
    text = f"{number(interval.value, places)}{unit}{f' {spread}' if spread else ''}"
    return Entry(text=text, value=interval)


@dataclass
class Rows:
    """A sheet while it is made; the reason of a failed cell becomes a note."""

    title: str
    heads: Sequence[str]
    _rows: list[tuple[Entry, ...]] = field(default_factory=list)
    _notes: Notes = field(default_factory=Notes)

    def add(self, *entries: Entry) -> None:
        """One row; the places that are left out at its end are blank."""
        missing = len(self.heads) - len(entries)
        self._rows.append((*entries, *[BLANK] * missing))

    def failed(self, result: Result) -> Entry:
        """Stands where a cell has no number: its status, and a note with the reason."""
        worst = result.cell.worst
        cause = where(worst)
        mark = superscript((self._notes.mark(cause),)) if worst.cause else ""
        return Entry(
            text=f"{STATUS[worst.status]}{mark}", value={"status": worst.status, "cause": cause}
        )

    def sheet(self) -> Sheet:
        """The finished table."""
        marked = [f"{superscript((k,))} {t}" for k, t in enumerate(self._notes.texts, start=1)]
        return Sheet(
            title=self.title, heads=tuple(self.heads), rows=tuple(self._rows), notes=tuple(marked)
        )


def of_workload(found: Iterable[Result], *names: str) -> list[Result]:
    """The cells of some workloads, whatever their parameters."""
    return [result for result in found if result.cell.first.workload.name in names]


def parameters(result: Result) -> Parameters:
    """The workload's parameters that are not at their defaults."""
    return dict(result.cell.first.workload.parameters)


def device_counts(found: Iterable[Result]) -> list[int]:
    """How many devices there are cells of."""
    return sorted({result.devices for result in found})


def differing(found: Sequence[Result]) -> list[str]:
    """The axes that differ between cells of the same framework.

    What a framework alone decides (its own layout, its own way to run a step) needs no word.
    """
    frameworks = dict.fromkeys(result.plan.framework for result in found)
    groups = [[r.cell for r in found if r.plan.framework == name] for name in frameworks]
    named = {axis for group in groups if len(group) > 1 for axis in axes.varying(group)}
    return [axis for axis in axes.AXES if axis in named]


def differing_words(found: Sequence[Result]) -> list[str]:
    """Those of them whose values say what they are."""
    return [a for a in differing(found) if a in axes.TEXTUAL and a not in ("framework", "device")]
