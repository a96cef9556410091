"""Write the report of a results folder in the forms that are asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from nfold.analysis import sections as sections_module
from nfold.analysis.sections import ReportSection
from nfold.core.errors import ExtraMissing, UsageError
from nfold.explain.result.budget import Budget
from nfold.explain.result.view import ExplanationView
from nfold.fieldreports.catalog import build_field_report
from nfold.fieldreports.sheets import FieldReport
from nfold.report import export as csv_form
from nfold.report import export as markdown_form


def write_report(
    results: Path,
    *,
    html: Path | None = None,
    csv: Path | None = None,
    markdown: Path | None = None,
    workload: str | None = None,
    cell: str | None = None,
    field: str | None = None,
    only: Collection[str] | None = None,
) -> list[Path]:
    """Write what is in the store of ``results``; the paths that were written.

    ``workload`` keeps one workload, ``only`` some cells by their ids; ``cell`` chooses the run
    whose telemetry is drawn; ``field`` names a field report that comes first. Parts of
    operations go into a CSV file of their own beside ``csv``. Raises StoreUnusable without
    measurements, UnknownValue for a workload or cell that was not measured, ExtraMissing where
    HTML needs a library that is not installed, UsageError where a file cannot be written.
    """
    measured = sections_module.load_measurements(results, workload, only)
    made = None if field is None else build_field_report(field, measured)
    sections = sections_module.group_sections(measured)
    if cell is not None:
        sections_module.check_cell(sections, cell)
    texts: list[tuple[Path, str]] = []
    if html is not None:
        texts.append((html, _html(sections, results, cell, made)))
    if csv is not None:
        texts.append((csv, csv_form.cells_csv(sections)))
        parts = csv_form.part_timings_csv(sections)
        texts += [(csv.with_name(f"{csv.stem}-parts{csv.suffix}"), parts)] if parts else []
    if markdown is not None:
        texts.append((markdown, markdown_form.report_markdown(sections, made)))
    return [_write(path, text) for path, text in texts]


def write_explanation_report(
    view: ExplanationView,
    budget: Budget,
    *,
    html: Path | None = None,
    markdown: Path | None = None,
) -> list[Path]:
    """Write one explanation; return the paths written. Raises as ``write_report`` does."""
    texts: list[tuple[Path, str]] = []
    if html is not None:
        try:
            from nfold.report import explanation_page
        except ModuleNotFoundError as error:
            raise ExtraMissing(error.name or "altair", "report") from None
        texts.append((html, explanation_page.explanation_page(view, budget)))
    if markdown is not None:
        from nfold.report import explanation

        texts.append((markdown, explanation.explanation_markdown(view, budget)))
    return [_write(path, text) for path, text in texts]


def _html(
    sections: Sequence[ReportSection], results: Path, cell: str | None, made: FieldReport | None
) -> str:
    try:
        from nfold.report import html_page as html_form
    except ModuleNotFoundError as error:
        raise ExtraMissing(error.name or "altair", "report") from None
    return html_form.report_page(sections, results, cell, made)


def _write(path: Path, text: str) -> Path:
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{path} cannot be written: {reason}; next: name another file") from None
    return path
