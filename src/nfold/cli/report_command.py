"""``nfold report``, and the tables that ``nfold bench`` prints too."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nfold.analysis.part_timings import part_timings
from nfold.analysis.sections import (
    check_cell,
    group_sections,
    headline_sentences,
    load_measurements,
)
from nfold.cli import render, terminal
from nfold.cli.render import TextTable
from nfold.core.errors import ExtraMissing, UsageError
from nfold.fieldreports.catalog import build_field_report
from nfold.report import tables
from nfold.report.export import measurements_document
from nfold.report.writer import ReportContent, write_files

if TYPE_CHECKING:
    from rich.console import Console

    from nfold.analysis.sections import ReportSection
    from nfold.fieldreports.sheets import FieldReport

STDOUT = Path("-")


def run_report(
    *,
    workload: str | None,
    results: Path,
    html: Path | None,
    csv: Path | None,
    md: Path | None,
    cell: str | None,
    field: str | None,
    as_json: bool,
) -> None:
    """Print stored results as a table or JSON, and write the files that are named."""
    measured = load_measurements(results, workload)
    sections = group_sections(measured)
    field_report = None if field is None else build_field_report(field, measured)
    if cell is not None:
        check_cell(sections, cell)
    named = {"html": html, "csv": csv, "md": md}
    to_stdout = [form for form, path in named.items() if path == STDOUT]
    if len(to_stdout) + as_json > 1:
        options = ", ".join([*(f"--{name} -" for name in to_stdout), *["--json"] * as_json])
        raise UsageError(f"{options}: only one can be standard output; next: name a file")
    content = ReportContent(results, sections, cell, field_report)
    if as_json:
        more = {} if field_report is None else {"report": field_report.to_json()}
        typer.echo(json.dumps(measurements_document(measured) | more, indent=2))
    elif not (html or csv or md):
        print_sections(sections, terminal.make_console(), field_report)
        try:
            (written,) = write_files(content, {"html": results / f"{field or 'report'}.html"})
            typer.echo(f"Wrote {written}")
        except ExtraMissing as error:
            render.print_note(f"no HTML report: {error}")
    if to_stdout:
        (form,) = to_stdout
        sys.stdout.write(content.text(form))
    files = {form: path for form, path in named.items() if path is not None and path != STDOUT}
    for path in write_files(content, files):
        if not as_json:
            typer.echo(f"Wrote {path}", err=bool(to_stdout))


def save_report(
    results: Path,
    *,
    quiet: bool = False,
    field: str | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Write the report of a results folder; the HTML page needs the report extra.

    ``only`` selects cells by id. The files of a field report have its name.
    """
    measured = load_measurements(results, None, only)
    field_report = None if field is None else build_field_report(field, measured)
    content = ReportContent(results, group_sections(measured), None, field_report)
    files = {kind: results / f"{field or 'report'}.{kind}" for kind in ("html", "csv", "md")}
    try:
        write_files(content, files)
        shown = files["html"]
    except ExtraMissing as error:
        write_files(content, {kind: path for kind, path in files.items() if kind != "html"})
        shown = files["md"]
        render.print_note(f"no HTML report: {error}")
    if not quiet:
        render.print_line(f"report: {shown}")


def print_sections(
    sections: Sequence[ReportSection], console: Console, field: FieldReport | None = None
) -> None:
    """Print every section: its conclusion, its tables, their notes. A field report replaces them."""
    if field is not None:
        print_field_report(field, console)
        return
    for section in sections:
        timings = part_timings(section.results)
        table = tables.build_table(section.results)
        render.print_text(console, " ".join(headline_sentences(section.results, timings)), "bold")
        render.print_text(console, f"{section.workload} on {section.machine.summary}", "dim")
        if table.shared:
            render.print_text(console, f"All cells: {tables.shared_text(table.shared)}", "dim")
        console.print()
        heads, rows = tables.flatten_table(table, compact=True)
        weights = [*[100.0] * len(table.axes), *(float(c.weight) for c in table.columns)]
        render.print_table(console, TextTable(heads=heads, rows=rows, weights=weights))
        render.print_notes(console, table.notes)
        parts = tables.parts_table(timings)
        if parts is not None:
            heads, rows = tables.flatten_parts_table(parts, compact=True)
            render.print_table(console, TextTable(heads=heads, rows=rows))
            render.print_notes(console, parts.notes)


def print_field_report(report: FieldReport, console: Console) -> None:
    """Print a field report: its conclusions, and its tables with published and new numbers."""
    render.print_text(console, report.title, "bold")
    for sentence in report.sentences:
        render.print_text(console, sentence)
    render.print_text(console, f"Then: {report.published_setup}", "dim")
    console.print()
    for sheet in report.sheets:
        render.print_text(console, f"{sheet.title}:")
        render.print_table(console, TextTable(heads=sheet.heads, rows=sheet.texts))
        for note in sheet.notes:
            render.print_text(console, note, "dim")
