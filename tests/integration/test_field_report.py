"""A field report from its command to its page, with real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
COMMAND = [sys.executable, "-m", "nfold"]


def _nfold(*arguments: str) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_quick_report_ends_without_a_failed_cell_and_is_shown_again(tmp_path: Path) -> None:
    where = ("--results", str(tmp_path))
    quick = ("--quick", "--devices", "cpu:1", "--steps", "2")
    text = _nfold("bench", "--report", "conv2d-devices", *quick, "--json", *where)
    found = json.loads(text)
    assert found["schema"] == 1
    assert {m["status"] for m in found["measurements"]} == {"ok"}
    whole, cpu, problems = found["report"]["tables"]
    rows = {row["devices"]: row for row in whole["rows"]}
    assert rows["then: V100, one call"]["8"] == 721.6
    assert rows["now: first call"]["1"]["value"] > 0
    assert {row[""] for row in cpu["rows"]} >= {"scipy.signal.convolve2d, 1 core"}
    assert [row["filter"] for row in problems["rows"]].count(10) == 1
    assert any("first call takes" in sentence for sentence in found["report"]["sentences"])
    page = (tmp_path / "conv2d-devices.html").read_text()
    assert "Load of the devices and of the host" in page
    assert "then: K80, one call" in _nfold("report", "--report", "conv2d-devices", *where)
