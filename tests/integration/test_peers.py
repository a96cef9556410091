"""Arms that train in turns on CPU devices, one of which fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

DRIVER = Path(__file__).resolve().parents[2] / "benchmarks" / "peers" / "peers.py"
WORKING = (
    "careful",
    "resident:compile=0",
    "nfold:input=resident",
    "ablated:strategy=nfold,without=bytes",
)
SHORT = ("--device=cpu", "--batch=16", "--warmup=2", "--rounds=2", "--window-seconds=0.05")


@pytest.mark.slow(parts=8)
@pytest.mark.integration
@pytest.mark.timeout(180)
def test_arms_take_turns_and_a_failed_one_stops_no_other(tmp_path: Path) -> None:
    arms = [f"--arm={name}" for name in (*WORKING, "prototype")]
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(DRIVER), "digits:samples=64", *SHORT, *arms, f"--out={out}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(out.read_text())["runs"]
    for number in range(2):
        turns = [window["arm"] for window in run["windows"] if window["round"] == number]
        assert sorted(turns) == sorted(WORKING)
    assert all(0 < window["loss"] < 10 for window in run["windows"])
    assert all(window["samples"] == 16 * window["steps"] for window in run["windows"])
    errors = {arm["name"]: arm["error"] for arm in run["arms"]}
    assert errors == {**dict.fromkeys(WORKING), "prototype": errors["prototype"]}
    assert "CUDA graph" in errors["prototype"]
    assert "failed: exit status 1" in done.stdout
    assert left(tmp_path) == []


def left(folder: Path) -> list[int]:
    """Processes that have a file in the folder open."""
    found = []
    for process in psutil.process_iter():
        try:
            files = [file.path for file in process.open_files()]
        except psutil.Error:
            continue
        found += [process.pid for path in files if path.startswith(str(folder))]
    return found
