"""The table of the parts of an operation, by number of devices, with CPU baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nfold.analysis.cell_labels import Footnotes
from nfold.analysis.part_timings import BASELINE_COLUMN, PartTiming
from nfold.core.format import NO_NUMBER, format_half_width, format_number, superscript


@dataclass(frozen=True, kw_only=True)
class PartEntry:
    """A timing, and the numbers of its footnotes."""

    timing: PartTiming
    marks: tuple[int, ...] = ()

    @property
    def value(self) -> str:
        """Milliseconds."""
        return format_number(self.timing.ms.value)

    @property
    def compact(self) -> str:
        """``1.23 ±0.03``."""
        spread = format_half_width(self.timing.ms)
        return f"{self.value}{f' {spread}' if spread else ''}{superscript(self.marks)}"

    @property
    def full(self) -> str:
        """``1.23 (1.20–1.26) · 53.5 GB/s``."""
        timing = self.timing
        about = f" ({timing.about})" if timing.about else ""
        rate = f" · {timing.rate}" if timing.rate else ""
        return f"{self.value}{about}{rate}{superscript(self.marks)}"


@dataclass(frozen=True, kw_only=True)
class PartsTable:
    """Parts by device count; ``baselines`` have one entry per part."""

    columns: tuple[str, ...]
    parts: tuple[tuple[str, tuple[PartEntry | None, ...]], ...]
    baselines: tuple[tuple[str, PartEntry], ...]
    notes: tuple[str, ...]


def parts_table(found: Sequence[PartTiming]) -> PartsTable | None:
    """Build the table; None without timings."""
    if not found:
        return None
    notes = Footnotes()
    columns = tuple(dict.fromkeys(t.column for t in found if not t.baseline))
    names = tuple(dict.fromkeys(t.part for t in found if not t.baseline))
    at = {(t.part, t.column): _entry(t, notes) for t in found if not t.baseline}
    return PartsTable(
        columns=columns,
        parts=tuple((name, tuple(at.get((name, column)) for column in columns)) for name in names),
        baselines=tuple((t.part, _entry(t, notes)) for t in found if t.baseline),
        notes=tuple(notes.texts),
    )


def _entry(timing: PartTiming, notes: Footnotes) -> PartEntry:
    return PartEntry(timing=timing, marks=tuple(notes.mark(text) for text in timing.notes))


def flatten_parts_table(
    made: PartsTable, *, compact: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of text, baselines in the first column."""
    width = max(1, len(made.columns))
    rows = [[name, *(_text(entry, compact) for entry in entries)] for name, entries in made.parts]
    rows += [[name, _text(entry, compact), *[""] * (width - 1)] for name, entry in made.baselines]
    return ["part [ms]", *(made.columns or (BASELINE_COLUMN,))], rows


def _text(entry: PartEntry | None, compact: bool) -> str:
    if entry is None:
        return NO_NUMBER
    return entry.compact if compact else entry.full
