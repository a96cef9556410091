"""A results folder that version 0.1 wrote stays readable: tests/fixtures/results-0.1."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nfold.cli.app import app
from nfold.store.store import Store

FIXTURE = Path(__file__).parents[2] / "fixtures" / "results-0.1"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURE, tmp_path / "results")


def test_ids_are_those_that_were_stored(results: Path) -> None:
    with Store.open(results) as store:
        found = store.measurements()
    with sqlite3.connect(results / "nfold.db") as connection:
        stored = dict(connection.execute("SELECT id, cell FROM measurement"))
    assert {measurement.id: measurement.cell for measurement in found} == stored
    assert len(stored) == 5


def test_the_report_shows_the_numbers_of_then(results: Path) -> None:
    shown = CliRunner().invoke(app, ["report", "--results", str(results)]).output
    for number in ("4,442", "3,602", "0.81×"):
        assert number in shown
    done = CliRunner().invoke(app, ["report", "--results", str(results), "--json"])
    (comparison,) = json.loads(done.output)["comparisons"]
    assert comparison["speedup"]["value"] == pytest.approx(0.8109, abs=1e-4)
    assert comparison["warnings"] == []
    assert "4,442" in (results / "report.html").read_text()
