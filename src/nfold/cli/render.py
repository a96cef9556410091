"""Everything that commands print to standard output: lines, tables and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nfold.core.format import superscript, terminal_safe

if TYPE_CHECKING:
    from rich.console import Console

GAP = 3  # characters between two columns of a table
ESSENTIAL = 10.0  # weight from which a column is dropped only as the last resort


def print_line(text: str = "") -> None:
    """Print one line to standard output."""
    sys.stdout.write(terminal_safe(text) + "\n")


def print_note(text: str) -> None:
    """Print one line to standard error."""
    sys.stderr.write(f"nfold: {terminal_safe(text)}\n")


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object to standard output."""
    sys.stdout.write(json.dumps(value) + "\n")


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of text. A narrow screen drops the columns of the smallest weights first.

    Without weights all columns are essential. The first column always stays.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    weights: Sequence[float] | None = None

    def is_numeric(self, column: int) -> bool:
        """Return whether any cell of a column begins with a digit."""
        return any(row[column][:1].isdigit() for row in self.rows)


def print_table(console: Console, table: TextTable) -> None:
    """Print a table within the width of the console.

    Wraps text at spaces, never inside a number. Columns that still do not fit are dropped and
    named below the table.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    widths, dropped = fit_columns(table, console.width)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column, width in widths.items():
        justify: Any = "right" if table.is_numeric(column) else "left"
        head = Text(terminal_safe(table.heads[column]))
        made.add_column(head, justify=justify, width=width, overflow="fold")
    for row in table.rows:
        made.add_row(*(Text(terminal_safe(row[column])) for column in widths))
    console.print(made)
    if dropped:
        names = ", ".join(table.heads[column] for column in sorted(dropped))
        note = f"Not shown at {console.width} columns: {names}; next: a wider terminal, or --json"
        print_text(console, note, "dim")
    console.print()


def fit_columns(table: TextTable, width: int) -> tuple[dict[int, int], list[int]]:
    """Return the width of each column that is shown, and the columns that are dropped.

    Drops optional columns first, then wraps numbers before their interval, then drops any column.
    """
    columns = range(len(table.heads))
    weights = table.weights or [ESSENTIAL - column / 100 for column in columns]
    optional = [c for c in columns if table.weights and weights[c] < ESSENTIAL]
    natural = {c: _text_width(table, c, by_word=False) for c in columns}
    least = {c: _text_width(table, c, by_word=not table.is_numeric(c)) for c in columns}
    shown, dropped = list(columns), list[int]()

    def drop_lightest(candidates: Sequence[int]) -> None:
        for column in sorted(candidates, key=lambda column: weights[column]):
            if len(shown) > 1 and sum(least[c] + GAP for c in shown) - GAP > width:
                shown.remove(column)
                dropped.append(column)

    drop_lightest(optional)
    if sum(least[c] + GAP for c in shown) - GAP > width:
        least = {c: _text_width(table, c, by_word=True) for c in columns}
    drop_lightest([c for c in shown if c != 0])
    widths = {c: natural[c] for c in shown}
    while sum(size + GAP for size in widths.values()) - GAP > width:
        loose = [c for c in shown if widths[c] > least[c]]
        if not loose:
            break
        widths[max(loose, key=lambda c: widths[c])] -= 1
    return {c: min(size, width) for c, size in widths.items()}, dropped


def _text_width(table: TextTable, column: int, *, by_word: bool) -> int:
    from rich.cells import cell_len

    texts = [terminal_safe(row[column]) for row in table.rows]
    # A head may always wrap in a column that may wrap at all; a number never does.
    words = [word for text in texts for word in (text.split() if by_word else [text])]
    head = terminal_safe(table.heads[column])
    heads = head.split() if by_word or table.is_numeric(column) else [head]
    return max(1, *map(cell_len, [*words, *heads]), 1)


def print_grid(console: Console, rows: Sequence[Sequence[str]]) -> None:
    """Print rows without a header; long cells are folded."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2), pad_edge=True)
    for column in range(max(map(len, rows), default=0)):
        grid.add_column(overflow="fold", no_wrap=column == 0)
    for row in rows:
        grid.add_row(*(Text(terminal_safe(cell)) for cell in row))
    console.print(grid)


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print a paragraph, wrapped at spaces."""
    from rich.text import Text

    console.print(Text(terminal_safe(text), style=style))


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """Print numbered footnotes and an empty line."""
    for number, note in enumerate(notes, start=1):
        print_text(console, f"{superscript((number,))} {note}", "dim")
    if notes:
        console.print()
