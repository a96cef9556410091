"""Inception's arms side by side on CPU devices, the careful one with its workers' own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from photos import folders

DRIVER = Path(__file__).resolve().parents[2] / "benchmarks" / "peers" / "inception.py"
SHORT = ("--device=cpu", "--batch=2", "--most=2", "--steps=1", "--warmup=1")


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no room for two arms")
def test_arms_side_by_side_give_rates_and_a_failed_one_stops_no_other(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    environment = {
        **os.environ,
        "NFOLD_DATA": str(folders(tmp_path / "data")),
        "NFOLD_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    workload = "--workload=inception_v3:size=75,classes=2,aux=0,repeat=4"
    arms = "--arms=model@1 careful@1 decode@1"
    done = subprocess.run(
        [sys.executable, str(DRIVER), workload, *SHORT, arms, f"--out={out}"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    rates = found["images_per_s"]
    assert (len(rates["model@1"]), len(rates["careful@1"])) == (3, 3)
    assert min(map(min, rates.values())) > 0
    if find_spec("torchvision") is None:
        assert list(found["failed"]) == ["decode@1"]
    assert found["alone"]["decodes"]["low"] > 0
    assert "a core decodes" in done.stdout
