"""A user's own workload under ``nfold train`` and ``nfold bench``: real processes, CPU devices."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nfold.analysis.cells import epochs
from nfold.core.measurement import Measurement
from nfold.store.store import Store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
MODULE = """
import numpy as np
import torch
from torch import nn

import nfold
from helpers import sgd

DRAW = np.random.default_rng(0)

def floats(width=16):
    samples = DRAW.normal(size=(220, 6))
    labels = (samples @ DRAW.normal(size=(6, 3))).argmax(1)
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    return nfold.Training(
        model=model, train=(samples[:190], labels[:190]), test=(samples[190:], labels[190:]),
        optimizer=sgd, batch=32, epochs=2,
    )

def images():
    images = DRAW.integers(0, 256, (90, 6, 6, 3), dtype=np.uint8)
    return nfold.Training(
        model=nn.Sequential(nn.Flatten(), nn.Linear(108, 1)),
        train=(torch.from_numpy(images), torch.rand(90)),
        loss=lambda outputs, targets: (outputs[:, 0] - targets).square().mean(),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
        augmentation=(("crop", 1), ("flip", 0)), batch=32,
    )

def wrong():
    return nfold.Training(
        model=nn.Linear(7, 3), train=(np.zeros((8, 6)), np.zeros(8, int)), optimizer=sgd
    )

def unseeded():
    samples = np.random.default_rng().normal(size=(8, 6))
    return nfold.Training(model=nn.Linear(6, 3), train=(samples, np.zeros(8, int)), optimizer=sgd)
"""
HELPERS = """
import torch

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project.py").write_text(MODULE)
    (tmp_path / "helpers.py").write_text(HELPERS)
    return tmp_path


def nfold(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "nfold", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def train(folder: Path, workload: str, *arguments: str) -> dict[str, Any]:
    done = nfold(folder, "train", workload, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def stored(folder: Path) -> list[Measurement]:
    with Store.open_readonly(folder / "nfold-results") as store:
        return store.measurements()


def losses(document: dict[str, Any]) -> list[float]:
    return [epoch["train_loss"] for epoch in document["epochs"]]


@pytest.mark.slow
def test_floats_train_alike_on_two_devices(project: Path) -> None:
    one = train(project, "project:floats", "--devices", "cpu:1", "--epochs", "3")
    two = train(project, "project:floats", "--devices", "cpu:2", "--epochs", "3")
    assert losses(one) == pytest.approx(losses(two), rel=1e-4)
    assert losses(one)[2] < losses(one)[0]
    assert one["workload"] == "project:floats"
    assert one["plan"]["batch"] == 32
    assert 0 < one["epochs"][2]["accuracy"] <= 1
    (kept,) = {m.workload.code for m in stored(project)}
    assert len(kept) == 16
    for measurement in stored(project):
        assert [epoch.samples for epoch in epochs(measurement)] == [190] * 3
        assert len({rank.parameter_checksum for rank in measurement.ranks}) == 1
        hashed = [rank.sample_hashes[0][0] for rank in measurement.ranks]
        assert sum(hashed) == 190


@pytest.mark.slow
def test_it_resumes_after_a_stop_unless_the_code_changed(project: Path) -> None:
    plan = ("--devices", "cpu:1", "--epochs", "20", "--json")
    whole = train(project, "project:floats", *plan, "--results", "whole")
    command = [sys.executable, "-P", "-m", "nfold", "train", "project:floats", *plan]
    kept = ("--checkpoint", "kept")
    process = subprocess.Popen(
        [*command, *kept], cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not list(project.glob("kept/run-1/step-*")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    with (project / "helpers.py").open("a") as file:
        file.write("# changed\n")
    again = nfold(project, "train", "project:floats", *plan, *kept)
    changed, resumed, *_ = again.stderr.splitlines()
    assert "with other imports or in another environment; continues" in changed
    assert resumed.startswith("resuming after epoch ")
    assert losses(json.loads(again.stdout)) == losses(whole)
    with (project / "project.py").open("a") as file:
        file.write("# changed\n")
    refused = nfold(project, "train", "project:floats", *plan, *kept)
    assert refused.returncode == 2
    assert "another machine, or other code; next: --again" in refused.stderr


@pytest.mark.slow
def test_other_imports_are_measured_anew_and_trained_when_requested(project: Path) -> None:
    plan = ("project:floats", "--devices", "cpu:1", "--epochs", "1")
    note = "trained before, with other imports or in another environment; --again starts over"
    for _ in range(2):
        assert nfold(project, "bench", *plan, "--no-report").returncode == 0
    first = train(project, *plan)
    assert len(stored(project)) == 1
    helpers = project / "helpers.py"
    helpers.write_text(helpers.read_text().replace("0.05", "0.06"))
    seen = nfold(project, "train", *plan, "--json")
    assert note in seen.stderr
    assert losses(json.loads(seen.stdout)) == losses(first)
    assert nfold(project, "bench", *plan, "--no-report").returncode == 0
    assert len(stored(project)) == 2
    other = train(project, *plan, "--again")
    assert losses(other) != losses(first)
    helpers.write_text(helpers.read_text().replace("0.06", "0.05"))
    assert note in nfold(project, "train", *plan, "--json").stderr


@pytest.mark.slow
def test_images_are_augmented_alike_and_a_regression_has_no_accuracy(project: Path) -> None:
    bench = ("bench", "project:images", "--devices", "cpu:1,cpu:2", "--epochs", "1", "--json")
    done = nfold(project, *bench, "--input", "resident", "--no-report")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["measurements"]
    assert [m["status"] for m in found] == ["ok"] * 2
    ended = [m["epochs"][0] for m in found]
    assert [epoch["accuracy"] for epoch in ended] == [None] * 2
    assert [e["train_loss"] for e in ended] == pytest.approx([ended[0]["train_loss"]] * 2, rel=1e-4)
    shown = nfold(project, "report", "--md", "report.md")
    assert shown.returncode == 0, shown.stderr
    assert "project:images" in (project / "report.md").read_text()


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize(
    ("workload", "devices", "code", "reason"),
    [
        ("project:floats:width=-1", "cpu:1", 1, r"RuntimeError.*\(project\.py:14\); next: python"),
        pytest.param("project:wrong", "cpu:1", 1, "mat1 and mat2", marks=pytest.mark.slow),
        pytest.param(
            *("project:unseeded", "cpu:2", 1, "made different data or weights on different ranks"),
            marks=pytest.mark.slow,
        ),
        ("project:nothing", "cpu:1", 2, "unknown function of project 'nothing'"),
    ],
)
def test_what_fails_is_one_error(
    project: Path, workload: str, devices: str, code: int, reason: str
) -> None:
    done = nfold(project, "train", workload, "--devices", devices)
    assert done.returncode == code, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("nfold: error: ")]
    assert re.search(reason, error), error
    assert "Traceback" not in done.stderr
