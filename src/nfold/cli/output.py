"""What ``nfold bench`` prints besides its progress."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nfold.bench.estimate import Estimate
from nfold.bench.grid import Grid
from nfold.bench.sweep import Schedule
from nfold.cli import inert
from nfold.cli.progress import cell_name, duration
from nfold.errors import ExtraMissing
from nfold.measurement import Measurement


def say(text: str = "") -> None:
    """One line on standard output."""
    sys.stdout.write(inert(text) + "\n")


def print_json(text: str) -> None:
    """One JSON object and nothing else."""
    sys.stdout.write(text + "\n")


def print_scope(asked: Grid, todo: Schedule) -> None:
    """How many cells there are, and what was merged or kept from before."""
    words = [f"{len(asked.cells)} cells"]
    if asked.merged:
        words.append(f"{asked.merged} more combinations are the same on one device")
    if todo.done:
        failed = sum(m.status != "ok" for _, m in todo.done)
        note = f", {failed} of them not ok" if failed else ""
        words.append(f"{len(todo.done)} measured before{note} (--again measures them anew)")
    say("; ".join(words))


def print_plan(asked: Grid, todo: Schedule, expected: Sequence[Estimate]) -> None:
    """The grid and an estimate of its time; nothing is run."""
    for turn in todo.todo:
        reason = f"  unsupported: {turn.cell.reason}" if turn.cell.reason else ""
        repeat = f" · repeat {turn.repeat + 1}" if turn.repeat else ""
        say(f"{cell_name(turn)}{repeat}{reason}")
    print_scope(asked, todo)
    bases = ", ".join(dict.fromkeys(part.basis for part in expected))
    say(f"about {duration(sum(part.seconds for part in expected))} ({bases})")


def print_table(found: Sequence[Measurement]) -> None:
    """The tables that ``nfold report`` prints, of these measurements alone."""
    from nfold.cli.report import show
    from nfold.report.query import sections

    show(sections(found))


def write_report(results: Path) -> None:
    """Write the report of the results folder and say where; HTML where the extra is installed."""
    from nfold.report.report import write

    page, text = results / "report.html", results / "report.md"
    try:
        written = write(results, html=page, csv=results / "report.csv", markdown=text)
    except ExtraMissing as error:
        written = write(results, html=None, csv=results / "report.csv", markdown=text)
        say(f"no HTML report: {error}")
    say(f"report: {written[0]}")
