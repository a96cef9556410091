"""``nfold report``: the store as a table, a page, Markdown, CSV or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from nfold.report.query import Section

PAGE = "report.html"
WIDTH = 100
PIPED_WIDTH = 1000
"""No table is wider: piped, nothing wraps."""


def command(
    workload: Annotated[
        str | None, typer.Argument(help="Only this workload, for example cnn10.")
    ] = None,
    results: Annotated[
        Path, typer.Option(envvar="NFOLD_RESULTS", help="Folder of the store.")
    ] = Path("nfold-results"),
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write unrounded numbers.")] = None,
    md: Annotated[Path | None, typer.Option(help="Write Markdown.")] = None,
    cell: Annotated[
        str | None, typer.Option(metavar="ID", help="The cell whose telemetry the page draws.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report what was measured; without a file named, print the table and write the page."""
    from nfold.report.query import check_cell, load, sections

    measured = load(results, workload)
    found = sections(measured)
    if cell is not None:
        check_cell(found, cell)
    named = html or csv or md
    if as_json:
        from nfold.document import document

        typer.echo(json.dumps(document(measured), indent=2))
    elif not named:
        show(found)
        html = results / PAGE
    if html or csv or md:
        _write(results, html, csv, md, workload, cell, quiet=as_json)


def _write(
    results: Path,
    html: Path | None,
    csv: Path | None,
    md: Path | None,
    workload: str | None,
    cell: str | None,
    *,
    quiet: bool,
) -> None:
    from nfold.report.report import write

    written = write(results, html=html, csv=csv, markdown=md, workload=workload, cell=cell)
    for path in written if not quiet else ():
        typer.echo(f"Wrote {path}")


def show(found: Sequence[Section]) -> None:
    """Print every section: what it says at a glance, its tables, and their notes."""
    from nfold.report import parts, tables
    from nfold.report.headline import headline
    from nfold.report.words import inert

    for section in found:
        made, timings = tables.table(section.results), parts.timings(section.results)
        _line(f"{inert(section.workload)} on {inert(section.machine.summary)}", style="bold")
        _line(" ".join(headline(section.results, timings)))
        if made.shared:
            _line(f"In all cells: {tables.shared_text(made.shared)}", style="dim")
        _table(*tables.narrow(made))
        _notes(made.notes)
        in_parts = parts.table(timings)
        if in_parts is not None:
            _table(*parts.flat(in_parts, compact=True))
            _notes(in_parts.notes)


def _notes(notes: Sequence[str]) -> None:
    from nfold.report.words import superscript

    for number, note in enumerate(notes, start=1):
        _line(f"{superscript((number,))} {note}", style="dim")
    if notes:
        typer.echo()


def _line(text: str, style: str = "") -> None:
    from rich.text import Text

    _console().print(Text(text, style=style))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Numbers on the right; piped, as wide as it needs to be."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, head in enumerate(heads):
        texts = [row[place] for row in rows]
        table.add_column(Text(head), justify="right" if _numeric(texts) else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    console = _console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    console.print(table)
    console.print()


def _numeric(texts: Sequence[str]) -> bool:
    """Whether a column holds numbers, perhaps with a failure among them."""
    return any(text[:1].isdigit() for text in texts)


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console
