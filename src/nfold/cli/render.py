"""What ``nfold bench`` prints besides its progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nfold.bench.duration_estimate import DurationEstimate
from nfold.bench.grid import Grid
from nfold.bench.sweep import SweepSchedule
from nfold.cli import terminal
from nfold.cli.progress import describe_cell, format_short_duration
from nfold.core.errors import ExtraMissing
from nfold.core.format import terminal_safe
from nfold.core.measurement import Measurement
from nfold.core.serialization import JSON_SCHEMA_VERSION
from nfold.explain.result.budget import Budget
from nfold.explain.result.conclusion import write_conclusion


def print_line(text: str = "") -> None:
    """One line on standard output."""
    sys.stdout.write(terminal_safe(text) + "\n")


def print_json(value: dict[str, Any]) -> None:
    """One JSON object and nothing else."""
    sys.stdout.write(json.dumps(value) + "\n")


def print_sweep_scope(grid: Grid, todo: SweepSchedule) -> None:
    """How many cells there are, and what was merged or kept from before."""
    words = [f"{len(grid.cells)} cell{'s' * (len(grid.cells) != 1)}"]
    if grid.duplicates:
        words.append(f"{grid.duplicates} more combinations are the same on one device")
    if todo.done:
        failed = sum(m.status != "ok" for _, m in todo.done)
        note = f", {failed} of them not ok" if failed else ""
        words.append(f"{len(todo.done)} measured before{note} (--again measures them anew)")
    print_line("; ".join(words))


def print_sweep_plan(
    grid: Grid, todo: SweepSchedule, expected: Sequence[DurationEstimate], *, as_json: bool
) -> None:
    """The grid and an estimate of its time; nothing is run."""
    if as_json:
        print_json(_plan_document(grid, todo, expected))
        return
    for turn in todo.pending:
        reason = (
            f"  unsupported: {turn.cell.unsupported_reason}" if turn.cell.unsupported_reason else ""
        )
        print_line(f"{describe_cell(turn)}{reason}")
    print_sweep_scope(grid, todo)
    bases = ", ".join(dict.fromkeys(part.basis for part in expected))
    if expected:
        print_line(
            f"about {format_short_duration(sum(part.seconds for part in expected))} ({bases})"
        )


def _plan_document(
    grid: Grid, todo: SweepSchedule, expected: Sequence[DurationEstimate]
) -> dict[str, Any]:
    planned = [
        {
            "cell": turn.cell.id,
            "workload": str(turn.cell.workload),
            "plan": turn.cell.plan.to_dict(),
            "repeat": turn.repeat,
            "unsupported": turn.cell.unsupported_reason,
            "estimated_seconds": part.seconds,
            "basis": part.basis,
        }
        for turn, part in zip(todo.pending, expected, strict=True)
    ]
    return {
        "schema": JSON_SCHEMA_VERSION,
        "planned": planned,
        "measured_before": [measurement.id for _, measurement in todo.done],
        "merged": grid.duplicates,
        "estimated_seconds": sum(part.seconds for part in expected),
    }


def print_cell_tables(
    found: Sequence[Measurement], *, plain: bool = False, field: str | None = None
) -> None:
    """The tables that ``nfold report`` prints, of these measurements alone."""
    from nfold.analysis.sections import group_sections
    from nfold.cli.report_command import print_sections
    from nfold.fieldreports.catalog import build_field_report

    made = None if field is None else build_field_report(field, found)
    print_sections(group_sections(found), terminal.make_console(plain=plain), made)


def field_report_document(found: Sequence[Measurement], field: str) -> dict[str, Any]:
    """What a field report adds to the JSON of its measurements."""
    from nfold.fieldreports.catalog import build_field_report

    return {"report": build_field_report(field, found).to_json()}


def save_report(
    results: Path,
    *,
    quiet: bool = False,
    field: str | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Write the report of the results folder and say where; HTML where the extra is installed.

    A field report has files of its own name, with these cells alone.
    """
    from nfold.report.writer import write_report

    name = field or "report"
    page, text, table = (results / f"{name}.{kind}" for kind in ("html", "md", "csv"))
    chosen: dict[str, Any] = {"csv": table, "markdown": text, "field": field, "only": only}
    try:
        written = write_report(results, html=page, **chosen)
    except ExtraMissing as error:
        written = write_report(results, **chosen)
        written = [text, *written]
        sys.stderr.write(terminal_safe(f"no HTML report: {error}") + "\n")
    if not quiet:
        print_line(f"report: {written[0]}")


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
    from nfold.report.writer import write_explanation_report

    page, text = results / EXPLANATION_PAGE, results / EXPLANATION_MARKDOWN
    try:
        written = write_explanation_report(budget, html=page, markdown=text)
    except ExtraMissing as error:
        written = write_explanation_report(budget, markdown=text)
        sys.stderr.write(terminal_safe(f"no HTML report: {error}") + "\n")
    if not quiet:
        print_line(f"report: {written[0]}")


def _line(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(terminal_safe(text), style=style))


def _block(console: Console, rows: Sequence[Sequence[str]]) -> None:
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
