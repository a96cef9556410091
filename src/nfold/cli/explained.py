"""The N-fold budget as a person reads it in a terminal, and the report of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nfold.budget import Budget
from nfold.cli import output, terminal
from nfold.errors import ExtraMissing
from nfold.inert import terminal_safe
from nfold.sentences import write_conclusion

if TYPE_CHECKING:
    from rich.console import Console

EXPLANATION_PAGE, EXPLANATION_MARKDOWN = "explain.html", "explain.md"


def print_explanation(budget: Budget, *, plain: bool = False) -> None:
    """Print everything, at most 100 columns wide."""
    from nfold.report import explanation

    console = terminal.make_console(plain=plain)
    _line(console, explanation.explanation_title(budget), "bold")
    if budget.headline:
        _line(console, budget.headline, "bold")
    for text in budget.training_errors:
        _line(console, f"WRONG TRAINING: {text}", "bold red")
    console.print()
    _table(console, explanation.SPEED_HEADS, explanation.speed_rows(budget))
    told: set[str] = set()
    for head, rows in explanation.cost_tables(budget):
        _line(console, head)
        _block(console, [row if row[-1] not in told else (*row[:-1], "") for row in rows])
        told |= {row[-1] for row in rows}
    for note in explanation.explanation_notes(budget):
        _line(console, note, "dim")
    console.print()
    for sentence in write_conclusion(budget):
        _line(console, sentence)


def save_explanation(budget: Budget, results: Path, *, quiet: bool) -> None:
    """Write the page and the Markdown and say where; without the extra, Markdown alone."""
    from nfold.report.report import write_explanation_report

    page, text = results / EXPLANATION_PAGE, results / EXPLANATION_MARKDOWN
    try:
        written = write_explanation_report(budget, html=page, markdown=text)
    except ExtraMissing as error:
        written = write_explanation_report(budget, markdown=text)
        sys.stderr.write(terminal_safe(f"no HTML report: {error}") + "\n")
    if not quiet:
        output.print_line(f"report: {written[0]}")


def _line(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(terminal_safe(text), style=style))


def _block(console: Console, rows: Sequence[Sequence[str]]) -> None:
    """Rows of an explanation, and below them the change of each: code is read in long lines."""
    from rich.table import Table
    from rich.text import Text

    from nfold.report.explanation import COST_HEADS

    _table(console, COST_HEADS[:-1], [row[:-1] for row in rows])
    changes = Table.grid(padding=(0, 2, 0, 0))
    changes.add_column(no_wrap=True)
    changes.add_column(overflow="fold")  # a line of the user's code is told whole
    for cause, *_, change in rows:
        if change:
            changes.add_row(*(Text(terminal_safe(cell)) for cell in (f"  {cause}", change)))
    if changes.row_count:
        _line(console, "What to change")
        console.print(changes)
        console.print()


def _table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from nfold.report.explanation import NUMERIC_HEADS

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, head in enumerate(heads):
        numbers = head in NUMERIC_HEADS
        keep = numbers or place == 0
        table.add_column(
            Text(head),
            justify="right" if numbers else "left",
            no_wrap=keep,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(terminal_safe(cell)) for cell in row))
    console.print(table)
    console.print()
