"""Steps in parts, on one and on two CPU devices: the same training as in one part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from made import plan
from nfold.core.measurement import Measurement
from nfold.core.workload import Workload
from nfold.engines.checkpoint_folder import newest_checkpoint
from nfold.engines.torch.checkpoint import read_part
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine
from warm_runs import warm_options

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
SAID: dict[str, Any] = {"batch": 61, "epochs": 2, "cores_per_device": 1}
TWO: dict[str, Any] = {"devices": 2}
IN_PARTS: tuple[dict[str, Any], ...] = (
    {"accumulate": 2},
    {"accumulate": 3, "input": "resident"},
    {**TWO, "accumulate": 2, "strategy": "ddp", "input": "resident"},
    {**TWO, "accumulate": 3, "strategy": "ddp"},
    {**TWO, "accumulate": 3, "strategy": "nfold"},
)


@dataclass(frozen=True)
class Trained:
    """A measurement, and the parameters at its end."""

    done: Measurement
    parameters: dict[str, torch.Tensor]


def _train(folder: Path, **changes: Any) -> Trained:
    """124 samples: batches of 61, 61 and 2, the last too small for three parts or two shares."""
    host = inspect_machine()
    kept = folder / "kept"
    done = run(
        Workload.parse("digits:samples=124"),
        plan(host, **SAID, **changes),
        machine=host,
        options=warm_options(folder, checkpoint_folder=kept),
    )
    assert done.status == "ok", done.cause
    found = newest_checkpoint(kept)
    assert found is not None
    return Trained(done, read_part(found, "model-0"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return _train(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("changes", IN_PARTS, ids=str)
def test_parts_change_neither_losses_nor_parameters(
    whole: Trained, changes: dict[str, Any], tmp_path: Path
) -> None:
    """But for the rounding of sums in another order."""
    other = _train(tmp_path, **changes)
    for first, second in zip(_epochs(whole), _epochs(other), strict=True):
        assert second.samples == first.samples == 124
        assert second.train_loss == pytest.approx(first.train_loss, rel=1e-5)
    for name, values in whole.parameters.items():
        assert torch.allclose(other.parameters[name], values, rtol=1e-4, atol=1e-6)
    assert len({rank.parameter_checksum for rank in other.done.ranks}) == 1
    assert _hashes(other) == _hashes(whole)


def _epochs(trained: Trained) -> tuple[Any, ...]:
    return trained.done.ranks[0].epochs


def _hashes(trained: Trained) -> list[tuple[int, int]]:
    """Samples of every epoch over all ranks, and the sum of their hashes."""
    every = zip(*(rank.sample_hashes for rank in trained.done.ranks), strict=True)
    return [
        (sum(count for count, _ in epoch), sum(int(text, 16) for _, text in epoch) % 2**64)
        for epoch in every
    ]
