"""nfold explain of scripts nobody changed, on two CPU devices, in a short time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two CPU devices need two cores"),
]


def explained(
    folder: Path, name: str, budget: str, *arguments: str, by: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What nfold says of a script, or of a package ``by`` a module of it, in a folder of its own.

    The folder stays as it was.
    """
    copy = shutil.copytree if (SCRIPTS / name).is_dir() else shutil.copy
    copy(SCRIPTS / name, folder / name)
    nfold = [sys.executable, "-m", "nfold", "explain", *(by or (name,)), "--devices", "cpu:2"]
    done = subprocess.run(
        [*nfold, "--budget", budget, "--no-report", "--json", "--", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {"nfold-results", name}
    assert not list(folder.glob("nfold-results/measurements/*/scratch*"))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def with_a_slow_rank(folder: Path, name: str) -> dict[str, Any]:
    """What nfold says of a script whose second rank works for 10 ms more in every step."""
    for _ in range(5):
        # On a busy machine the time is over before the rank is known; the next one goes on.
        found = explained(folder, name, "60s")
        first = found["budget"][0] if found["budget"] else {}
        if first.get("cause") == "imbalance" and first["lost_ms"]["value"] > 5:
            break
    assert first["cause"] == "imbalance"
    assert "rank 1" in first["fix"]
    assert first["lost_ms"]["value"] > 5
    assert found["plan"]["batch"] == 64
    assert found["wrong"] == []
    return found


@pytest.mark.slow(parts=8)
def test_the_slow_rank_of_a_script_is_named_first(tmp_path: Path) -> None:
    assert "last.pt" in str(with_a_slow_rank(tmp_path, "uneven_ranks.py")["warnings"])


@pytest.mark.slow
def test_ranks_that_a_script_would_start_itself_are_nfolds(tmp_path: Path) -> None:
    """It has a world of two and a port in it, which a run on one device would wait at."""
    found = with_a_slow_rank(tmp_path, "spawned.py")
    assert found["plan"]["strategy"] == "ddp"
    assert found["one_device"]["step_ms"]["value"] < found["n_devices"]["step_ms"]["value"]


@pytest.mark.slow
def test_a_module_of_a_package_is_run_as_python_does(tmp_path: Path) -> None:
    name = ("-m", "training.loop")
    found = explained(tmp_path, "training", "40s", "--width", "8", by=name)
    assert found["target"] == "-m training.loop --width 8"
    assert found["plan"]["batch"] == 10
    assert found["one_device"]["samples_per_s"]["value"] > 0
    assert "training/epoch.txt" in str(found["warnings"])
    assert not (tmp_path / "training/epoch.txt").exists()


@pytest.mark.slow
def test_a_script_for_one_device_is_told_so_first(tmp_path: Path) -> None:
    found = explained(tmp_path, "one_device.py", "40s", "--width", "64")
    assert found["target"] == "one_device.py --width 64"
    assert found["warnings"][0]["kind"] == "headline"
    assert found["one_device"]["samples_per_s"]["value"] > 0
    assert "log.txt" in str(found["warnings"])


@pytest.mark.slow
def test_what_the_script_needs_on_several_devices_is_said_first(tmp_path: Path) -> None:
    found = explained(tmp_path, "accumulated.py", "40s")
    assert found["warnings"][0]["text"].startswith(
        "accumulated.py fails as 2 processes, as torchrun starts it: AssertionError "
        "(accumulated.py:24 `assert accumulation_steps % world_size == 0`); next: pass "
        "--accumulation_steps=2."
    )


@pytest.mark.slow
def test_a_starved_device_is_compared_with_its_input_replayed(tmp_path: Path) -> None:
    for _ in range(4):
        # On a busy machine the time is over before the trials are done; the next one goes on.
        several = explained(tmp_path, "starved_device.py", "30s")["several_devices"]
        if several is not None and several["exchange_ms"] is not None:
            break
    assert several["input_ms"]["value"] > 0.2 * several["step_ms"]["value"]
    assert several["exchange_ms"]["value"] >= 0


@pytest.mark.slow
def test_batches_that_a_sampler_of_the_script_s_own_makes_are_left_as_they_are(
    tmp_path: Path,
) -> None:
    """No two have as many samples, and the gradients of their words are sparse."""
    found = explained(tmp_path, "bucketed.py", "40s")
    assert found["one_device"]["samples_per_s"]["value"] > 0
    assert found["n_devices"]["samples_per_s"]["value"] > 0
    assert found["wrong"] == []
