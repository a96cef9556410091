"""nfold explain on two CPU devices: a sensible answer, whatever the time allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def test_two_cpu_devices_are_explained(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two CPU devices need two cores")
    command = ["digits:samples=128", "--devices", "cpu:2", "--batch", "32", "--budget", "20s"]
    done = subprocess.run(
        [sys.executable, "-m", "nfold", "explain", *command, "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["one_device"]["samples_per_s"]["value"] > 0
    speedup = found["speedup"]
    assert speedup["low"] <= speedup["value"] <= speedup["high"]
    assert found["wrong"] == []
    untested = {w["kind"] for w in found["warnings"] if w["kind"].startswith("untested_")}
    tested = {row["cause"] for row in found["budget"]}
    assert "undivided-work" in tested
    assert {"untested_network", "untested_storage", "untested_memory"} <= untested
    assert (tmp_path / "nfold-results" / "explain.md").exists()
