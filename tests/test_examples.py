"""Every example runs, before and after; nfold's lines are few, and all of them are needed."""

from __future__ import annotations

import difflib
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FOLDERS = sorted(folder.name for folder in EXAMPLES.iterdir() if folder.is_dir())
OWN_WORKLOADS = {"own_workload": "handwriting:digits:width=32"}
NAMES = [name for name in FOLDERS if name not in OWN_WORKLOADS]
MOST_LINES = 6
SHORT = {
    "mnist": ("--epochs", "1", "--samples", "1000"),
    "cifar10": ("--epochs", "1", "--samples", "40", "--batch", "20"),
    "own_model": ("--epochs", "2"),
}
DATA = {"mnist": "mnist", "cifar10": "cifar10", "own_model": None}


def lines(name: str, which: str) -> list[str]:
    text = (EXAMPLES / name / f"{which}.py").read_text()
    return [line for line in text.splitlines() if line.strip()]


@functools.cache
def run(name: str, which: str, *before: str) -> list[float]:
    """The accuracies that a script prints, launched once by the words ``before`` it."""
    data = os.environ.get("NFOLD_DATA")
    needed = DATA[name]
    if needed is not None and (data is None or not (Path(data) / needed).is_dir()):
        pytest.skip(f"needs {needed} in NFOLD_DATA")
    script = str(EXAMPLES / name / f"{which}.py")
    done = subprocess.run(
        [*(before or (sys.executable,)), script, *SHORT[name]],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [float(found) for found in re.findall(r"accuracy ([0-9.]+)", done.stdout)]


def test_every_example_has_both_scripts_and_a_test() -> None:
    assert sorted(OWN_WORKLOADS.keys() | SHORT.keys()) == FOLDERS
    assert NAMES == sorted(SHORT) == sorted(DATA)
    for name in NAMES:
        assert (EXAMPLES / name / "before.py").exists()
        assert (EXAMPLES / name / "after.py").exists()


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_differ(name: str) -> None:
    changes = list(difflib.ndiff(lines(name, "before"), lines(name, "after")))
    assert 0 < sum(line.startswith("+ ") for line in changes) <= MOST_LINES
    assert sum(line.startswith("- ") for line in changes) <= MOST_LINES
    assert "nfold" not in "\n".join(lines(name, "before"))


@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", NAMES)
def test_before_and_after_run(name: str) -> None:
    before, after = run(name, "before"), run(name, "after")
    assert len(before) == len(after) > 0
    assert all(0 <= accuracy <= 1 for accuracy in before + after)


@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["mnist", "own_model"])
def test_two_devices_train_as_one(name: str, tmp_path: Path) -> None:
    """The same samples in the same order; only dropout draws differ between ranks."""
    nfold = str(Path(sys.executable).with_name("nfold"))
    launched = (nfold, "run", "--nproc-per-node", "2", "--results", str(tmp_path))
    one, two = run(name, "after"), run(name, "after", *launched)
    tolerance = 0.0 if name == "own_model" else 0.1
    assert two == pytest.approx(one, abs=tolerance + 1e-6)


@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", OWN_WORKLOADS)
def test_an_own_workload_trains(name: str, tmp_path: Path) -> None:
    nfold = [sys.executable, "-P", "-m", "nfold", "train", OWN_WORKLOADS[name]]
    command = [*nfold, "--devices", "cpu:1", "--epochs", "3", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=EXAMPLES / name, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"^accuracy ([0-9.]+)", done.stdout)
    assert float(accuracy) > 0.6
