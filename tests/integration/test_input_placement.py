"""Where data and augmentation are placed changes no loss, on one and on two CPU devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from made import plan
from nfold.measurement import Measurement, RankSamples
from nfold.run.options import Options
from nfold.run.run import run
from nfold.telemetry.inspection import inspect_machine
from nfold.workload import Workload

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
LOADER: dict[str, Any] = {"input": "loader", "augment": "cpu"}
RAW_LOADER: dict[str, Any] = {"input": "loader", "augment": "device", "workers": 1}
RESIDENT: dict[str, Any] = {"input": "resident"}


def _train(results: Path, workload: str, **changes: Any) -> Measurement:
    host = inspect_machine()
    asked = plan(host, **{"cores_per_device": 1, **changes})
    options = Options(results=results, telemetry_interval_s=0.5)
    done = run(Workload.parse(workload), asked, machine=host, options=options)
    assert done.status == "ok", done.cause
    return done


def _results(rank: RankSamples) -> tuple[object, ...]:
    """What must be identical: every window's loss, the samples, the parameters at the end."""
    losses = [epoch.train_loss for epoch in rank.epochs]
    return losses, rank.losses, rank.sample_hashes, rank.parameter_checksum


def _same(results: Path, workload: str, *placements: dict[str, Any], **said: Any) -> None:
    first, *others = (_train(results, workload, **said, **placed) for placed in placements)
    assert len(first.ranks) == said["devices"]
    assert first.ranks[0].losses
    for other in others:
        pairs = zip(first.ranks, other.ranks, strict=True)
        assert all(_results(mine) == _results(theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("devices", [1, 2])
def test_digits_in_epochs_with_batches_that_do_not_divide(devices: int, tmp_path: Path) -> None:
    _same(tmp_path, "digits", LOADER, RESIDENT, devices=devices, batch=61, epochs=2)


@pytest.mark.parametrize("devices", [1, 2])
def test_augmented_images_in_steps_over_several_epochs(
    devices: int, tmp_path: Path, shared_data: Path
) -> None:
    """Batches of 21 of 50 samples: the third of an epoch holds 8."""
    del shared_data
    length = {"steps": 5, "warmup_steps": 2}
    placements = (LOADER, RAW_LOADER, RESIDENT)
    _same(tmp_path, "cnn10:samples=50", *placements, devices=devices, batch=21, **length)


def test_data_that_does_not_fit_is_a_row_with_both_sizes(tmp_path: Path) -> None:
    """Two ranks' copies of 100 KiB each on a host said to have 150 KiB."""
    host = dataclasses.replace(inspect_machine(), memory_bytes=150 * 2**10)
    asked = plan(host, devices=2, cores_per_device=1, batch=61, epochs=1, **RESIDENT)
    options = Options(results=tmp_path, telemetry_interval_s=0.5)
    refused = run(Workload.parse("digits"), asked, machine=host, options=options)
    assert refused.status == "oom"
    assert refused.cause is not None
    for said in ("'resident' needs 0.000193 GiB", "free 0.000143 GiB", "next: --input loader"):
        assert said in refused.cause.text
