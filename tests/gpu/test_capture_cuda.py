"""Every step on GPUs: captured, compiled and eager runs have the same losses, and they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from made import plan
from nfold.measurement import Measurement
from nfold.run.options import Options
from nfold.run.run import run
from nfold.telemetry.inspection import inspect_machine
from nfold.workload import Workload

pytestmark = [pytest.mark.gpu, pytest.mark.integration, pytest.mark.timeout(400)]
HOST = inspect_machine()
STEPS = ("captured", "compiled", "compiled+captured")


def _train(results: Path, **changes: object) -> Measurement:
    asked = {"device": "cuda", "batch": 96, "epochs": 10, "warmup_steps": 1, **changes}
    done = run(
        Workload.parse("digits"),
        plan(HOST, **asked),
        machine=HOST,
        options=Options(results=results),
    )
    assert done.status == "ok", done.cause
    return done


def _losses(done: Measurement) -> list[float]:
    return [epoch.train_loss for epoch in done.ranks[0].epochs]


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("input_", ["resident", "loader"])
def test_losses_do_not_depend_on_the_step(tmp_path: Path, devices: int, input_: str) -> None:
    """Batches of 96 of 1,437 samples: the last of an epoch is smaller, shares differ on three."""
    if len(HOST.gpus) < devices:
        pytest.skip(f"needs {devices} GPUs")
    said = {"devices": devices, "input": input_, "workers": 0 if input_ == "resident" else 1}
    eager = _train(tmp_path / "eager", **said)
    for step in STEPS:
        other = _train(tmp_path / step, step=step, **said)
        assert _losses(other) == pytest.approx(_losses(eager), rel=2e-2, abs=1e-3)
        assert other.ranks[0].sample_hashes == eager.ranks[0].sample_hashes
        assert len({rank.parameter_checksum for rank in other.ranks}) == 1


@pytest.mark.skipif(len(HOST.gpus) < 1, reason="needs a GPU")
def test_augmentation_is_drawn_anew_in_every_replayed_epoch(tmp_path: Path) -> None:
    """cnn10 on few samples: eager draws them for each epoch, and so must a graph."""
    said = {"input": "resident", "batch": 64, "epochs": 6, "precision": "fp32"}
    pair = []
    for step in ("eager", "captured"):
        done = run(
            Workload.parse("cnn10:samples=256"),
            plan(HOST, device="cuda", step=step, **said),
            machine=HOST,
            options=Options(results=tmp_path / step),
        )
        assert done.status == "ok", done.cause
        pair.append(_losses(done))
    assert pair[1] == pytest.approx(pair[0], rel=5e-2)
