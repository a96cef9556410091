"""What ``nfold bench`` prints besides its progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from nfold.bench.estimate import Estimate
from nfold.bench.grid import Grid
from nfold.bench.sweep import Schedule
from nfold.cli import terminal
from nfold.cli.progress import cell_name, duration
from nfold.errors import ExtraMissing
from nfold.inert import inert
from nfold.measurement import Measurement
from nfold.summary import SCHEMA


def say(text: str = "") -> None:
    """One line on standard output."""
    sys.stdout.write(inert(text) + "\n")


def print_json(value: dict[str, Any]) -> None:
    """One JSON object and nothing else."""
    sys.stdout.write(json.dumps(value) + "\n")


def print_scope(asked: Grid, todo: Schedule) -> None:
    """How many cells there are, and what was merged or kept from before."""
    words = [f"{len(asked.cells)} cell{'s' * (len(asked.cells) != 1)}"]
    if asked.merged:
        words.append(f"{asked.merged} more combinations are the same on one device")
    if todo.done:
        failed = sum(m.status != "ok" for _, m in todo.done)
        note = f", {failed} of them not ok" if failed else ""
        words.append(f"{len(todo.done)} measured before{note} (--again measures them anew)")
    say("; ".join(words))


def print_plan(asked: Grid, todo: Schedule, expected: Sequence[Estimate], *, as_json: bool) -> None:
    """The grid and an estimate of its time; nothing is run."""
    if as_json:
        print_json(_plan_document(asked, todo, expected))
        return
    for turn in todo.todo:
        reason = f"  unsupported: {turn.cell.reason}" if turn.cell.reason else ""
        say(f"{cell_name(turn)}{reason}")
    print_scope(asked, todo)
    bases = ", ".join(dict.fromkeys(part.basis for part in expected))
    if expected:
        say(f"about {duration(sum(part.seconds for part in expected))} ({bases})")


def _plan_document(asked: Grid, todo: Schedule, expected: Sequence[Estimate]) -> dict[str, Any]:
    planned = [
        {
            "cell": turn.cell.id,
            "workload": str(turn.cell.workload),
            "plan": turn.cell.plan.to_dict(),
            "repeat": turn.repeat,
            "unsupported": turn.cell.reason,
            "estimated_seconds": part.seconds,
            "basis": part.basis,
        }
        for turn, part in zip(todo.todo, expected, strict=True)
    ]
    return {
        "schema": SCHEMA,
        "planned": planned,
        "measured_before": [measurement.id for _, measurement in todo.done],
        "merged": asked.merged,
        "estimated_seconds": sum(part.seconds for part in expected),
    }


def print_table(
    found: Sequence[Measurement], *, plain: bool = False, field: str | None = None
) -> None:
    """The tables that ``nfold report`` prints, of these measurements alone."""
    from nfold.cli.report import show
    from nfold.report.field.catalogue import field_report
    from nfold.report.query import sections

    made = None if field is None else field_report(field, found)
    show(sections(found), terminal.console(plain=plain), made)


def report_document(found: Sequence[Measurement], field: str) -> dict[str, Any]:
    """What a field report adds to the JSON of its measurements."""
    from nfold.report.field.catalogue import field_report

    return {"report": field_report(field, found).to_json()}


def write_report(
    results: Path,
    *,
    quiet: bool = False,
    field: str | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Write the report of the results folder and say where; HTML where the extra is installed.

    A field report has files of its own name, with these cells alone.
    """
    from nfold.report.report import write

    name = field or "report"
    page, text, table = (results / f"{name}.{kind}" for kind in ("html", "md", "csv"))
    chosen: dict[str, Any] = {"csv": table, "markdown": text, "field": field, "only": only}
    try:
        written = write(results, html=page, **chosen)
    except ExtraMissing as error:
        written = write(results, **chosen)
        written = [text, *written]
        sys.stderr.write(inert(f"no HTML report: {error}") + "\n")
    if not quiet:
        say(f"report: {written[0]}")
