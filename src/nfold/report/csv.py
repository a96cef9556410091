"""The report as CSV: one row a cell with unrounded numbers, and one a part of an operation."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from nfold import summary
from nfold.inert import terminal_safe
from nfold.plan import PLAN_FIELDS
from nfold.report import parts
from nfold.report.query import ReportSection
from nfold.report.results import CellResult
from nfold.report.tables import failure_location
from nfold.stats import Interval

CsvRow = dict[str, Any]


def cells_csv(sections: Sequence[ReportSection]) -> str:
    """One row a cell: its plan, its status, and every number with its interval.

    Units are in the names; a number that a cell does not have is empty.
    """
    return _written([_cell(section, r) for section in sections for r in section.results])


def part_timings_csv(sections: Sequence[ReportSection]) -> str:
    """One row for each part and column of the tables of parts; empty where there is none."""
    rows = [
        {
            "workload": section.workload,
            "machine": section.machine.id,
            "part": timing.part,
            "where": timing.column,
            "baseline": timing.baseline,
            **_interval("ms", timing.ms),
            "bytes_per_s": timing.bytes_per_s,
            "notes": "; ".join(timing.notes),
        }
        for section in sections
        for timing in parts.part_timings(section.results)
    ]
    return _written(rows) if rows else ""


def _cell(section: ReportSection, result: CellResult) -> CsvRow:
    cell, compared = result.cell, result.comparison
    return {
        "workload": section.workload,
        "machine": section.machine.id,
        "cell": cell.first.cell,
        "measurements": " ".join(m.id for m in cell.measurements),
        **{name: getattr(result.plan, name) for name in PLAN_FIELDS},
        "repeats": len(cell.measurements),
        "repeats_ok": len(cell.successful),
        "status": "ok" if result.succeeded else cell.first_failed_or_first.status,
        "cause": ""
        if result.succeeded or cell.first_failed_or_first.cause is None
        else failure_location(cell.first_failed_or_first),
        "epoch_1_s": result.first_epoch_s,
        "epochs_2_up_median_s": result.later_epochs_s,
        "training_s": result.training_s,
        **_interval("accuracy", result.accuracy),
        **_interval("samples_per_s", result.samples_per_s),
        "baseline_cell": compared.baseline.first.cell if compared else None,
        "scaling": compared.scaling if compared else None,
        **_interval("speedup", compared.speedup if compared else None),
        **_interval("efficiency", compared.efficiency if compared else None),
        "peak_memory_bytes": result.peak_memory_bytes,
        "data_bytes": summary.data_bytes(cell),
        "graph_bytes": summary.graph_bytes(cell),
        "reserved_memory_bytes": summary.reserved_memory_bytes(cell),
        "joules_per_1000_samples": result.joules_per_1000,
        "warnings": "; ".join(dict.fromkeys(d.text for m in cell.measurements for d in m.warnings)),
    }


def _interval(name: str, interval: Interval | None) -> CsvRow:
    if interval is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _written(rows: Sequence[CsvRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _safe(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _safe(value: Any) -> Any:
    """Text on one line; none that a spreadsheet would take for a formula."""
    if not isinstance(value, str):
        return value
    text = terminal_safe(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
