"""A user's own workload on GPUs: captured steps with any optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from made import plan
from nfold import workloads
from nfold.analysis.cells import epochs
from nfold.core.measurement import Measurement
from nfold.core.workload import Workload
from nfold.launch.launch_spec import RunOptions
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine

HOST = inspect_machine()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not HOST.gpus, reason="needs a GPU"),
]
MODULE = """
import numpy as np, torch, nfold
from torch import nn

DRAW = np.random.default_rng(0)
IMAGES = DRAW.integers(0, 256, (2000, 8, 8, 3), dtype=np.uint8)
LABELS = (IMAGES.mean((1, 2))).argmax(1)

def made(layers, samples, optimizer, **given):
    return nfold.Training(
        model=nn.Sequential(nn.Flatten(), nn.Linear(192, 64), *layers, nn.Linear(64, 3)),
        train=(samples[:1750], LABELS[:1750]), test=(samples[1750:], LABELS[1750:]),
        optimizer=optimizer, **given,
    )

def images():
    return made([nn.ReLU()], IMAGES, lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3),
                augmentation=(("flip", 0),))

def floats():
    return made([nn.ReLU()], IMAGES / 128 - 1, lambda m: torch.optim.RMSprop(m.parameters()))

class Waits(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x

def waits():
    return made([Waits()], IMAGES, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
"""


def _train(folder: Path, name: str, step: str, devices: int = 1, **changes: str) -> Measurement:
    (folder / "own_cuda.py").write_text(MODULE)
    requested = plan(HOST, device="cuda", devices=devices, batch=64, epochs=4, step=step, **changes)
    workload = workloads.with_fingerprint(Workload.parse(f"own_cuda:{name}"))
    return run(workload, requested, machine=HOST, options=RunOptions(results=folder))


@pytest.mark.parametrize("name", ["images", "floats"])
def test_a_graph_trains_as_the_eager_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = [
        _train(tmp_path, name, "eager", input="loader"),
        _train(tmp_path, name, "captured", input="resident"),
        _train(tmp_path, name, "captured", devices=min(2, len(HOST.gpus)), input="resident"),
    ]
    assert [(m.status, m.cause) for m in found] == [("ok", None)] * 3
    losses = [[epoch.train_loss for epoch in epochs(m)] for m in found]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[2] == pytest.approx(losses[1], rel=0.02)
    accuracy = epochs(found[1])[-1].accuracy
    assert accuracy is not None
    assert accuracy > 0.5


def test_a_model_that_waits_for_the_device_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failed = _train(tmp_path, "waits", "captured", input="resident")
    assert failed.status == "crashed"
    assert failed.cause is not None
    assert "own_cuda.py:25); next: --step eager" in failed.cause.text
