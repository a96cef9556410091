"""What ``nfold bench`` prints besides its progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from nfold.bench.duration_estimate import DurationEstimate
from nfold.bench.grid import Grid
from nfold.bench.sweep import SweepSchedule
from nfold.cli import terminal
from nfold.cli.progress import describe_cell, format_short_duration
from nfold.core.errors import ExtraMissing
from nfold.core.format import terminal_safe
from nfold.core.measurement import Measurement
from nfold.core.serialization import JSON_SCHEMA_VERSION


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
