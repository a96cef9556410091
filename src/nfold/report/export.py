"""The report as CSV (unrounded), Markdown and JSON."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Collection, Sequence
from typing import Any

from nfold.analysis import cells
from nfold.analysis.cell_labels import failure_location
from nfold.analysis.cells import group_cells, measurement_json
from nfold.analysis.comparison import CellResult, compare_all
from nfold.analysis.part_timings import part_timings
from nfold.analysis.sections import ReportSection, headline_sentences
from nfold.core.format import superscript, terminal_safe
from nfold.core.measurement import Measurement
from nfold.core.plan import PLAN_FIELDS
from nfold.core.serialization import JSON_SCHEMA_VERSION
from nfold.core.stats import Interval
from nfold.fieldreports.sheets import FieldReport
from nfold.report import tables

CsvRow = dict[str, Any]


def cells_csv(sections: Sequence[ReportSection]) -> str:
    """Return one CSV row per cell: plan, status, and every number with its interval.

    Column names have the units; missing numbers are empty.
    """
    return _write_rows([_cell(section, r) for section in sections for r in section.results])


def part_timings_csv(sections: Sequence[ReportSection]) -> str:
    """Return one CSV row per part of an operation and device count; empty without timings."""
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
        for timing in part_timings(section.results)
    ]
    return _write_rows(rows) if rows else ""


def _cell(section: ReportSection, result: CellResult) -> CsvRow:
    cell, compared = result.cell, result.comparison
    worst = cell.first_failed_or_first
    caveats = [caveat for m in cell.measurements for caveat in m.warnings]
    caveats += compared.caveats if compared else ()
    return {
        "workload": section.workload,
        "machine": section.machine.id,
        "cell": cell.first.cell,
        "measurements": " ".join(m.id for m in cell.measurements),
        **{name: getattr(result.plan, name) for name in PLAN_FIELDS},
        "repeats": len(cell.measurements),
        "repeats_ok": len(cell.successful),
        "status": "ok" if result.succeeded else worst.status,
        "cause": "" if result.succeeded or worst.cause is None else failure_location(worst),
        "epoch_1_s": result.first_epoch_s,
        "epochs_2_up_median_s": result.later_epochs_s,
        "training_s": result.training_s,
        **_interval("accuracy", result.accuracy),
        **_interval("samples_per_s", result.samples_per_s),
        **_interval("step_ms", cells.step_ms(cell)),
        "baseline_cell": compared.baseline.first.cell if compared else None,
        "scaling": compared.scaling if compared else None,
        **_interval("speedup", result.speedup),
        **_interval("efficiency", result.efficiency),
        **{name: cells.maximum_bytes(cell, name) for name in cells.MEMORY_FIELDS},
        "peak_memory_bytes": result.peak_memory_bytes,
        "joules_per_1000_samples": result.joules_per_1000,
        "warnings": "; ".join(dict.fromkeys(caveat.text for caveat in caveats)),
    }


def _interval(name: str, interval: Interval | None) -> CsvRow:
    value, low, high = (interval.value, interval.low, interval.high) if interval else [None] * 3
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _write_rows(rows: Sequence[CsvRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _safe(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _safe(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = terminal_safe(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&!])")


def report_markdown(sections: Sequence[ReportSection], field: FieldReport | None = None) -> str:
    """Return the field report, if any, and all sections as Markdown."""
    blocks = [] if field is None else _field_blocks(field)
    blocks += [block for section in sections for block in _blocks(section)]
    return "\n\n".join(blocks) + "\n"


def _field_blocks(field: FieldReport) -> list[str]:
    sentences = " ".join(field.sentences)
    blocks = [
        f"# {escape_markdown(field.title)}",
        f"**{escape_markdown(sentences)}**" if sentences else "",
        f"Then: {escape_markdown(field.published_setup)}.",
    ]
    for sheet in field.sheets:
        notes = "  \n".join(map(escape_markdown, sheet.notes))
        blocks += [f"{escape_markdown(sheet.title)}:", pipe_table(sheet.heads, sheet.texts), notes]
    return [block for block in blocks if block]


def _blocks(section: ReportSection) -> list[str]:
    made = tables.build_table(section.results)
    timings = part_timings(section.results)
    in_parts = tables.parts_table(timings)
    machine = escape_markdown(section.machine.summary)
    blocks = [
        f"## {escape_markdown(section.workload)} on {machine}",
        f"**{escape_markdown(' '.join(headline_sentences(section.results, timings)))}**",
        f"All cells: {escape_markdown(tables.shared_text(made.shared))}." if made.shared else "",
        pipe_table(*tables.flatten_table(made)),
        _notes(made.notes),
    ]
    if in_parts is not None:
        blocks += [pipe_table(*tables.flatten_parts_table(in_parts)), _notes(in_parts.notes)]
    return [block for block in blocks if block]


def _notes(notes: Sequence[str]) -> str:
    marked = enumerate(map(escape_markdown, notes), start=1)
    return "  \n".join(f"{superscript((number,))} {note}" for number, note in marked)


def pipe_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] | None = None
) -> str:
    """Return a GitHub table; ``numbers`` are right-aligned, by default all but the first column."""
    right = heads[1:] if numbers is None else numbers
    rule = ["---:" if head in right else "---" for head in heads]
    head, *others = ([*map(escape_markdown, line)] for line in (heads, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *others))


def escape_markdown(text: str) -> str:
    """Escape markup, HTML and line breaks."""
    return _SPECIAL.sub(r"\\\1", terminal_safe(text))


def measurements_document(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return ``{"schema", "machine", "machines", "measurements", "comparisons"}`` for JSON.

    ``machine`` is the machine of the newest measurement, or None; ``machines`` are all machines by
    id. Values that are not finite (a diverged loss) become null.
    """
    found = {
        "schema": JSON_SCHEMA_VERSION,
        "machine": measurements[-1].machine.to_dict() if measurements else None,
        "machines": {m.machine.id: m.machine.to_dict() for m in measurements},
        "measurements": [{**measurement_json(m), "machine": m.machine.id} for m in measurements],
        "comparisons": [one.to_json() for one in compare_all(group_cells(measurements))],
    }
    clean: dict[str, Any] = _finite(found)
    return clean


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
