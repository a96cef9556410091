"""``nfold report``: the store as a table, a page, Markdown, CSV or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nfold.analysis.part_timings import part_timings
from nfold.cli import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from nfold.analysis.sections import ReportSection
    from nfold.core.measurement import Measurement
    from nfold.fieldreports.sheets import FieldReport

PAGE_FILE = "report.html"
PIPED_WIDTH = 1000
"""No table is wider: piped, nothing wraps."""


WorkloadName = Annotated[str | None, typer.Argument(help="Only this workload, for example cnn10.")]
Results = Annotated[Path, typer.Option(envvar="NFOLD_RESULTS", help="Folder of the store.")]
Html = Annotated[Path | None, typer.Option(help="Write one self-contained page.")]
Csv = Annotated[Path | None, typer.Option(help="Write unrounded numbers.")]
Md = Annotated[Path | None, typer.Option(help="Write Markdown.")]
CellId = Annotated[
    str | None, typer.Option(metavar="ID", help="The cell whose telemetry the page draws.")
]
FieldName = Annotated[
    str | None,
    typer.Option(
        "--report",
        metavar="NAME",
        help="As one of the field reports that nfold bench --report measures.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def report_command(
    workload: WorkloadName = None,
    results: Results = Path("nfold-results"),
    html: Html = None,
    csv: Csv = None,
    md: Md = None,
    cell: CellId = None,
    field: FieldName = None,
    as_json: AsJson = False,
) -> None:
    """Report what was measured; without a file named, print the table and write the page."""
    from nfold.analysis.sections import check_cell, group_sections, load_measurements

    measured = load_measurements(results, workload)
    found = group_sections(measured)
    made = None if field is None else _field(field, measured)
    if cell is not None:
        check_cell(found, cell)
    named = html or csv or md
    if as_json:
        from nfold.report.export import measurements_document

        more = {} if made is None else {"report": made.to_json()}
        typer.echo(json.dumps(measurements_document(measured) | more, indent=2))
    elif not named:
        print_sections(found, terminal.make_console(), made)
        html = results / (f"{field}.html" if field else PAGE_FILE)
    if html or csv or md:
        from nfold.report.writer import write_report

        chosen: dict[str, Any] = {"workload": workload, "cell": cell, "field": field}
        written = write_report(results, html=html, csv=csv, markdown=md, **chosen)
        for path in written if not as_json else ():
            typer.echo(f"Wrote {path}")


def _field(name: str, measured: Sequence[Measurement]) -> FieldReport:
    from nfold.fieldreports.catalog import build_field_report

    return build_field_report(name, measured)


def print_field_report(made: FieldReport, console: Console) -> None:
    """Print a field report: its tables with the numbers of then, and what those of now say."""
    from nfold.core.format import terminal_safe

    _line(console, terminal_safe(made.title), style="bold")
    _line(console, f"Then: {terminal_safe(made.published_setup)}", style="dim")
    for sheet in made.sheets:
        _line(console, f"{terminal_safe(sheet.title)}:")
        _table(console, sheet.heads, sheet.texts)
        for note in sheet.notes:
            _line(console, note, style="dim")
    for sentence in made.sentences:
        _line(console, terminal_safe(sentence))
    console.print()


def print_sections(
    found: Sequence[ReportSection], console: Console, field: FieldReport | None = None
) -> None:
    """Print every section: what it says at a glance, its tables, and their notes.

    A field report takes their place: its tables have what matters of them.
    """
    if field is not None:
        print_field_report(field, console)
        return
    from nfold.core.format import terminal_safe
    from nfold.report import operation_parts, tables
    from nfold.report.summary_sentences import headline_sentences

    for section in found:
        made, timings = (
            tables.build_table(section.results),
            part_timings(section.results),
        )
        _line(
            console,
            f"{terminal_safe(section.workload)} on {terminal_safe(section.machine.summary)}",
            style="bold",
        )
        _line(console, " ".join(headline_sentences(section.results, timings)))
        if made.shared:
            _line(console, f"In all cells: {tables.shared_text(made.shared)}", style="dim")
        _table(console, *tables.fit_table(made))
        _notes(console, made.notes)
        in_parts = operation_parts.parts_table(timings)
        if in_parts is not None:
            _table(console, *operation_parts.flatten_parts_table(in_parts, compact=True))
            _notes(console, in_parts.notes)


def _notes(console: Console, notes: Sequence[str]) -> None:
    from nfold.core.format import superscript

    for number, note in enumerate(notes, start=1):
        _line(console, f"{superscript((number,))} {note}", style="dim")
    if notes:
        console.print()


def _line(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(text, style=style))


def _table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, head in enumerate(heads):
        texts = [row[place] for row in rows]
        table.add_column(Text(head), justify="right" if _numeric(texts) else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table, width=None if console.is_terminal else PIPED_WIDTH)
    console.print()


def _numeric(texts: Sequence[str]) -> bool:
    return any(text[:1].isdigit() for text in texts)
