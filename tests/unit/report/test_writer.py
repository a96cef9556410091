from __future__ import annotations

import sys
from pathlib import Path

import pytest

import measured
from nfold.analysis.sections import group_sections, load_measurements
from nfold.core.errors import ExtraMissing, StoreUnusable, UsageError
from nfold.report.writer import ReportContent, write_files
from nfold.store.store import Store


@pytest.fixture
def results(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "results") as store:
        store.append(measured.measurement())
    return tmp_path / "results"


def content(results: Path) -> ReportContent:
    return ReportContent(results, group_sections(load_measurements(results)))


def test_every_form_is_written(results: Path, tmp_path: Path) -> None:
    html, csv, md = (tmp_path / "new" / name for name in ("a.html", "a.csv", "a.md"))
    files = {"html": html, "csv": csv, "md": md}
    assert write_files(content(results), files) == [html, csv, md]
    assert html.read_text().startswith("<!doctype html>")
    assert csv.read_text().startswith("workload,machine,cell")
    assert md.read_text().startswith("## cnn10")
    assert sorted(path.name for path in html.parent.iterdir()) == ["a.csv", "a.html", "a.md"]


def test_parts_of_an_operation_have_their_own_csv(mixed: Path, tmp_path: Path) -> None:
    written = write_files(content(mixed), {"csv": tmp_path / "all.csv"})
    assert [path.name for path in written] == ["all.csv", "all-parts.csv"]


def test_without_a_store_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="does not exist"):
        content(tmp_path / "nowhere")


def test_without_the_extra_the_error_says_what_to_install(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("html_page", "figures", "chart_elements"):
        monkeypatch.delitem(sys.modules, f"nfold.report.{name}", raising=False)
        monkeypatch.delattr(f"nfold.report.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(ExtraMissing, match=r"altair is not installed; next: .*nfold\[report\]"):
        write_files(content(results), {"html": tmp_path / "a.html"})
    assert write_files(content(results), {"csv": tmp_path / "a.csv", "md": tmp_path / "a.md"})


def test_a_file_that_cannot_be_written_is_named(results: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"a\.csv cannot be written: .*; next: name another"):
        write_files(content(results), {"csv": tmp_path / "file" / "a.csv"})


def test_two_reports_at_once_do_not_mix(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, file = Path.replace, tmp_path / "a.csv"

    def replace_after_another_report(temporary: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        write_files(content(results), {"csv": file})
        return replace(temporary, target)

    monkeypatch.setattr(Path, "replace", replace_after_another_report)
    assert write_files(content(results), {"csv": file}) == [file]
    assert file.read_text() == content(results).text("csv")
    assert list(tmp_path.glob("*.csv*")) == [file]


def test_a_failed_write_leaves_no_temporary_file(results: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(UsageError, match=r"a\.csv cannot be written"):
        write_files(content(results), {"csv": tmp_path / "a.csv"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "results"]
