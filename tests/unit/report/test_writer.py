from __future__ import annotations

import sys
from pathlib import Path

import pytest

import measured
from nfold.core.errors import ExtraMissing, StoreUnusable, UnknownValue, UsageError
from nfold.report.writer import write_report
from nfold.store.store import Store


@pytest.fixture
def results(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "results") as store:
        store.append(measured.measurement())
    return tmp_path / "results"


def test_every_form_that_is_asked_for_is_written(results: Path, tmp_path: Path) -> None:
    html, csv, md = (tmp_path / "new" / name for name in ("a.html", "a.csv", "a.md"))
    assert write_report(results, html=html, csv=csv, markdown=md) == [html, csv, md]
    assert html.read_text().startswith("<!doctype html>")
    assert csv.read_text().startswith("workload,machine,cell")
    assert md.read_text().startswith("## cnn10")
    assert sorted(path.name for path in html.parent.iterdir()) == ["a.csv", "a.html", "a.md"]


def test_parts_of_an_operation_get_a_csv_of_their_own(mixed: Path, tmp_path: Path) -> None:
    written = write_report(mixed, csv=tmp_path / "all.csv")
    assert [path.name for path in written] == ["all.csv", "all-parts.csv"]


def test_without_a_store_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="does not exist"):
        write_report(tmp_path / "nowhere", html=tmp_path / "a.html")
    assert not (tmp_path / "a.html").exists()


def test_without_the_extra_the_error_says_what_to_install(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("nfold.report.")]:
        if name.rpartition(".")[2] in ("html", "figures", "charts", "canvas", "svg"):
            monkeypatch.delitem(sys.modules, name)
            monkeypatch.delattr(f"nfold.report.{name.rpartition('.')[2]}", raising=False)
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(ExtraMissing, match=r"altair is not installed; next: .*nfold\[report\]"):
        write_report(results, html=tmp_path / "a.html")
    assert write_report(results, csv=tmp_path / "a.csv", markdown=tmp_path / "a.md")


def test_a_file_that_cannot_be_written_is_named(results: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"a\.csv cannot be written: .*; next: name another"):
        write_report(results, csv=tmp_path / "file" / "a.csv")


def test_a_cell_that_is_not_there_is_refused(results: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownValue, match="unknown cell 'x'"):
        write_report(results, html=tmp_path / "a.html", cell="x")
