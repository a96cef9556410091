"""Write reports and explanations as HTML, CSV and Markdown files; keep explanations as values."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfold.analysis.sections import ReportSection
from nfold.core.errors import ExtraMissing, UsageError
from nfold.core.serialization import deserialize, replace_file, serialize
from nfold.core.workload import Workload
from nfold.explain.result.budget import Budget
from nfold.explain.result.view import ExplanationView, Previous
from nfold.fieldreports.sheets import FieldReport
from nfold.report import explanation, export
from nfold.report.tune_content import TunePageContent


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


def _write(path: Path, text: str, next_step: str = "name another file") -> Path:
    try:
        with replace_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{path} cannot be written: {reason}; next: {next_step}") from None
    return path


TUNE_PAGE_FILE = "tune.html"
EXPLANATION_FILE, PAGE_FILE, MARKDOWN_FILE = "explain.json", "explain.html", "explain.md"
FILE_VERSION = 1
RESERVED_NAMES = ("measurements", "telemetry")  # folders of the store


@dataclass(frozen=True, kw_only=True)
class StoredExplanation:
    """One explanation as it is kept. ``previous`` is that of the script before its last edit."""

    workload: Workload
    budget: Budget
    budget_s: float
    explained_at: str
    previous: Previous | None = None
    version: int = FILE_VERSION

    @classmethod
    def now(
        cls, workload: Workload, budget: Budget, budget_s: float, earlier: StoredExplanation | None
    ) -> StoredExplanation:
        """An explanation of this moment, which knows that of the script before its last edit."""
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(
            workload=workload,
            budget=budget,
            budget_s=budget_s,
            explained_at=time,
            previous=_previous(workload, earlier),
        )


def _previous(workload: Workload, earlier: StoredExplanation | None) -> Previous | None:
    """The explanation to compare with: of the same command, with other code."""
    if earlier is None or not workload.script or earlier.workload.script != workload.script:
        return None
    if earlier.workload.code == workload.code:
        return earlier.previous
    return Previous(
        samples_per_s=earlier.budget.n_devices.samples_per_s.value,
        devices=earlier.budget.devices,
        explained_at=earlier.explained_at,
    )


def explanation_folder(results: Path, workload: Workload) -> Path:
    """``nfold-results/sleepy`` for ``sleepy.py``: one folder per script or workload."""
    stem = workload.script[0].removesuffix(".py") if workload.script else str(workload)
    if workload.module is not None:
        stem = workload.module.removesuffix(".py")
    name = re.sub(r"[^\w.=-]+", "-", stem).strip("-.") or "script"
    return results / (f"{name}-explained" if name in RESERVED_NAMES else name)


def write_explanation(folder: Path, found: StoredExplanation, view: ExplanationView) -> str:
    """Keep the values, then write page and Markdown; return why there is no page, or nothing.

    Raises UsageError if a file cannot be written.
    """
    values = json.dumps(serialize(found))
    _write(folder / EXPLANATION_FILE, values, "another --results folder")
    missing = ""
    try:
        from nfold.report import explanation_page
    except ModuleNotFoundError as error:
        missing = str(ExtraMissing(error.name or "altair", "report"))
    else:
        _write(folder / PAGE_FILE, explanation_page.explanation_page(view, found.budget))
    _write(folder / MARKDOWN_FILE, explanation.explanation_markdown(view, found.budget))
    return missing


def write_tune_page(folder: Path, content: TunePageContent) -> str:
    """Write the page of a tuning; return why there is none, or nothing.

    Raises UsageError if the file cannot be written.
    """
    try:
        from nfold.report import tune_page
    except ModuleNotFoundError as error:
        return str(ExtraMissing(error.name or "altair", "report"))
    _write(folder / TUNE_PAGE_FILE, tune_page.tune_page(content))
    return ""


def read_values(folder: Path) -> StoredExplanation | None:
    """The kept explanation; None without one, or if another version of nfold wrote it."""
    try:
        values: Any = json.loads((folder / EXPLANATION_FILE).read_text(encoding="utf-8"))
        found = deserialize(StoredExplanation, values)
    except (OSError, ValueError):
        return None
    return found if found.version == FILE_VERSION else None


def find_latest(results: Path) -> StoredExplanation | None:
    """The newest kept explanation in a results folder."""
    found = [read_values(path.parent) for path in results.glob(f"*/{EXPLANATION_FILE}")]
    return max(filter(None, found), key=lambda one: one.explained_at, default=None)
