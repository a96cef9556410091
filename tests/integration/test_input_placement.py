"""Where data and augmentation are placed changes no loss, on one and on two CPU devices."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launched import launch
from made import plan
from nfold.core.measurement import Measurement, RankSamples
from nfold.core.serialization import deserialize
from nfold.core.workload import Workload
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine
from warm_runs import warm_options

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
LOADER: dict[str, Any] = {"input": "loader", "augment": "cpu"}
RAW_LOADER: dict[str, Any] = {"input": "loader", "augment": "device", "workers": 1}
RESIDENT: dict[str, Any] = {"input": "resident"}
DIGITS_BYTES = 1_437 * (8 * 8 + 8)
"""Images and labels."""
SMALL = 150 * 2**10
"""A host's memory that two copies of digits do not fit into, but one does."""
SCRIPT = Path(__file__).parent / "scripts" / "resident.py"


def _train(results: Path, workload: str, memory: int = 2**60, **changes: Any) -> Measurement:
    """On a host said to have so many bytes of ``memory``."""
    host = dataclasses.replace(inspect_machine(), memory_bytes=memory)
    requested = plan(host, **{"cores_per_device": 1, **changes})
    options = warm_options(results, telemetry_interval_s=0.5)
    done = run(Workload.parse(workload), requested, machine=host, options=options)
    assert done.status == "ok", done.cause
    return done


def _results(rank: RankSamples) -> tuple[object, ...]:
    """What must be identical: every window's loss, the samples, the parameters at the end."""
    losses = [epoch.train_loss for epoch in rank.epochs]
    return losses, rank.losses, rank.sample_hashes, rank.parameter_checksum


def _same(results: Path, workload: str, *placements: dict[str, Any], **fields: Any) -> None:
    first, *others = (_train(results, workload, **fields, **placed) for placed in placements)
    assert len(first.ranks) == fields["devices"]
    assert first.ranks[0].losses
    for other in others:
        pairs = zip(first.ranks, other.ranks, strict=True)
        assert all(_results(mine) == _results(theirs) for mine, theirs in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_digits_in_epochs_with_batches_that_do_not_divide(devices: int, tmp_path: Path) -> None:
    _same(tmp_path, "digits", LOADER, RESIDENT, devices=devices, batch=61, epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_augmented_images_in_steps_over_several_epochs(
    devices: int, tmp_path: Path, shared_data: Path
) -> None:
    """Batches of 21 of 50 samples: the third of an epoch holds 8."""
    del shared_data
    length = {"steps": 5, "warmup_steps": 2}
    placements = (LOADER, RAW_LOADER, RESIDENT)
    _same(tmp_path, "cnn10:samples=50", *placements, devices=devices, batch=21, **length)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "nfold"])
def test_sharded_data_give_what_whole_data_give(strategy: str, tmp_path: Path) -> None:
    """101 KiB of digits on a host said to have 150 KiB. Batches of 52, at last one of 33."""
    fields = {"devices": 2, "strategy": strategy, "batch": 52, "epochs": 2, **RESIDENT}
    whole = _train(tmp_path, "digits", **fields)
    sharded = _train(tmp_path, "digits", memory=SMALL, **fields)
    _check_sharded(whole.ranks, sharded.ranks)
    assert [caveat.kind for caveat in sharded.warnings].count("sharded") == 1
    assert "sharded" not in [caveat.kind for caveat in whole.warnings]


@pytest.mark.slow
def test_on_three_devices_those_without_a_sample_take_part_in_the_exchange(tmp_path: Path) -> None:
    whole, sharded = (_launched(tmp_path / str(free), free) for free in (2**30, SMALL))
    _check_sharded(whole, sharded)


def _launched(folder: Path, memory: int) -> list[RankSamples]:
    """Three ranks of the script, on however few cores."""
    folder.mkdir()
    launch(SCRIPT, 3, str(folder), str(memory))
    return [
        deserialize(RankSamples, json.loads((folder / f"{r}.json").read_text())) for r in range(3)
    ]


def _check_sharded(whole: Sequence[RankSamples], sharded: Sequence[RankSamples]) -> None:
    assert whole[0].losses
    for one, other in zip(whole, sharded, strict=True):
        assert _results(one) == _results(other)
        assert (one.data_bytes, one.graph_bytes, other.graph_bytes) == (DIGITS_BYTES, 0, 0)
        assert abs((other.data_bytes or 0) - DIGITS_BYTES / len(whole)) < 8 * 8 + 8
    assert sum(rank.data_bytes or 0 for rank in sharded) == DIGITS_BYTES


@pytest.mark.slow(parts=8)
def test_data_that_fit_nowhere_are_a_row_with_all_sizes(tmp_path: Path) -> None:
    """Two copies of 101 KiB, or two shards of half of it, on a host said to have 120 KiB."""
    host = dataclasses.replace(inspect_machine(), memory_bytes=120 * 2**10)
    requested = plan(host, devices=2, cores_per_device=1, batch=61, epochs=1, **RESIDENT)
    options = warm_options(tmp_path, telemetry_interval_s=0.5)
    refused = run(Workload.parse("digits"), requested, machine=host, options=options)
    assert refused.status == "oom"
    assert refused.cause is not None
    sizes = ("needs 0.000193 GiB (9.64e-05 GiB sharded)", "free 0.000114 GiB")
    for reason in (*sizes, "next: --input loader"):
        assert reason in refused.cause.text
