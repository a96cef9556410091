"""Write reports as HTML, CSV and Markdown files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nfold.analysis.sections import ReportSection
from nfold.core.errors import ExtraMissing, UsageError
from nfold.core.serialization import replace_file
from nfold.explain.result.budget import Budget
from nfold.explain.result.view import ExplanationView
from nfold.fieldreports.sheets import FieldReport
from nfold.report import explanation, export


@dataclass(frozen=True)
class ReportContent:
    """What a report shows: sections, the cell whose telemetry is drawn, a field report first."""

    results: Path
    sections: Sequence[ReportSection]
    cell: str | None = None
    field: FieldReport | None = None

    def text(self, form: str) -> str:
        """Return the report as ``html``, ``csv`` or ``md``; raises ExtraMissing for ``html``."""
        if form == "csv":
            return export.cells_csv(self.sections)
        if form == "md":
            return export.report_markdown(self.sections, self.field)
        try:
            from nfold.report import html_page
        except ModuleNotFoundError as error:
            raise ExtraMissing(error.name or "altair", "report") from None
        return html_page.report_page(self.sections, self.results, self.cell, self.field)


def write_files(content: ReportContent, files: Mapping[str, Path]) -> list[Path]:
    """Write a report in the forms ``html``, ``csv`` and ``md``; return the paths.

    Parts of operations are a second CSV file, ``NAME-parts.csv``. Raises ExtraMissing if the page
    needs a library that is not installed, UsageError if a file cannot be written.
    """
    texts = [(path, content.text(form)) for form, path in files.items()]
    parts = export.part_timings_csv(content.sections) if "csv" in files else ""
    if parts:
        path = files["csv"]
        texts.append((path.with_name(f"{path.stem}-parts{path.suffix}"), parts))
    return [_write(path, text) for path, text in texts]


def write_explanation_report(
    view: ExplanationView,
    budget: Budget,
    *,
    html: Path | None = None,
    markdown: Path | None = None,
) -> list[Path]:
    """Write one explanation; return the paths. Raises as ``write_files`` does."""
    texts: list[tuple[Path, str]] = []
    if html is not None:
        try:
            from nfold.report import explanation_page
        except ModuleNotFoundError as error:
            raise ExtraMissing(error.name or "altair", "report") from None
        texts.append((html, explanation_page.explanation_page(view, budget)))
    if markdown is not None:
        texts.append((markdown, explanation.explanation_markdown(view, budget)))
    return [_write(path, text) for path, text in texts]


def _write(path: Path, text: str) -> Path:
    try:
        with replace_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{path} cannot be written: {reason}; next: name another file") from None
    return path
