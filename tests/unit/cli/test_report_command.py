from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import measured
import measured_grids
from nfold.cli.app import app
from nfold.core.errors import NfoldError
from nfold.core.measurement import FailureCause
from nfold.store.store import Store


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    made = [*measured_grids.cpu_grid(), *measured_grids.operation_grid((1, 2))]
    measured_grids.write_store(folder, made)
    return folder


def test_without_a_file_the_table_is_printed_and_the_page_written(results: Path) -> None:
    page = results / "report.html"
    page.unlink(missing_ok=True)
    done = report("--results", results)
    assert done.exit_code == 0, done.output
    assert "2 devices are 1.8" in done.output
    assert "1 killed; rank 1 was ended by SIGKILL" in done.output
    assert "scipy.ndimage.convolve, 1 core" in done.output
    assert f"Wrote {page}" in done.output
    assert page.read_text().startswith("<!doctype html>")


def test_a_named_file_is_all_that_is_written(results: Path, tmp_path: Path) -> None:
    (results / "report.html").unlink(missing_ok=True)
    done = report("digits", "--results", results, "--md", tmp_path / "a.md")
    assert done.output == f"Wrote {tmp_path / 'a.md'}\n"
    assert not (results / "report.html").exists()
    assert "conv2d" not in (tmp_path / "a.md").read_text()


def test_json_is_one_object_and_nothing_else(results: Path, tmp_path: Path) -> None:
    done = report("digits", "--results", results, "--json", "--csv", tmp_path / "a.csv")
    found = json.loads(done.output)
    assert set(found) == {"schema", "machine", "machines", "measurements", "comparisons"}
    assert len(found["measurements"]) == 6
    assert (tmp_path / "a.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (["--results", "nowhere"], 4, "does not exist"),
        (["digit", "--results", "{results}"], 2, "unknown workload 'digit'"),
        (["--results", "{results}", "--cell", "x"], 2, "unknown cell 'x'"),
    ],
)
def test_what_is_not_there_is_one_clear_error(
    results: Path, arguments: list[str], exit_code: int, text: str
) -> None:
    done = report(*(argument.format(results=results) for argument in arguments))
    assert isinstance(done.exception, NfoldError)
    assert done.exception.exit_code == exit_code
    assert text in str(done.exception)
    assert done.output == ""


def test_hostile_text_does_not_reach_the_terminal(tmp_path: Path) -> None:
    cause = FailureCause(text="[red]x[/red]\x1b[31m\nsecond line")
    with Store.open(tmp_path) as store:
        store.append(measured.measurement(status="crashed", cause=cause, ranks=()))
    done = report("--results", tmp_path)
    assert "\x1b" not in done.output
    assert "[red]x[/red]\\x1b[31m second line" in done.output


def test_piped_rows_do_not_wrap(results: Path) -> None:
    done = report("conv2d", "--results", results)
    (row,) = [
        line for line in done.output.splitlines() if line.startswith("copy to device, pinned")
    ]
    assert len(row.split()) >= 8
