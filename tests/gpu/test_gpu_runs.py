"""Every strategy, layout and precision trains on GPUs, and faults end as data."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from made import plan
from nfold.core.machine import Machine
from nfold.core.measurement import Measurement
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import RunOptions, RunProgress
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.telemetry.nvml import Nvml
from nfold.telemetry.telemetry_csv import read_rows

pytestmark = [pytest.mark.gpu, pytest.mark.integration, pytest.mark.timeout(300)]
HOST = inspect_machine()
one_gpu = pytest.mark.skipif(len(HOST.gpus) < 1, reason="needs a GPU")
two_gpus = pytest.mark.skipif(len(HOST.gpus) < 2, reason="needs two GPUs")
FREE_BYTES = 1 << 28
"""What a card may show more than before the run: half of what CUDA alone takes for a process."""


@pytest.fixture
def host() -> Machine:
    return HOST


def _train(
    host: Machine, results: Path, workload: str = "digits", **changes: object
) -> Measurement:
    requested = plan(host, **{"device": "cuda", "batch": 64, "workers": 1, **changes})
    options = RunOptions(results=results, telemetry_interval_s=0.2, hang_timeout_s=20)
    return run(Workload.parse(workload), requested, machine=host, options=options)


@one_gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
def test_every_precision_and_layout_learns(
    host: Machine, tmp_path: Path, precision: str, layout: str
) -> None:
    done = _train(host, tmp_path, epochs=3, precision=precision, layout=layout)
    assert done.status == "ok", done.cause
    (rank,) = done.ranks
    assert rank.epochs[-1].accuracy is not None
    assert rank.epochs[-1].accuracy > 0.8
    assert rank.device.startswith("cuda:0")
    assert len(rank.step_ms) == sum(window.steps for window in rank.windows)


@two_gpus
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_two_gpus_train_as_one(
    host: Machine, tmp_path: Path, strategy: str, accumulate: int
) -> None:
    fields: dict[str, Any] = {"strategy": strategy, "accumulate": accumulate, "devices": 2}
    one = _train(host, tmp_path, epochs=2, precision="fp32")
    two = _train(host, tmp_path, epochs=2, precision="fp32", **fields)
    assert two.status == "ok", two.cause
    assert len(two.ranks) == (2 if strategy == "ddp" else 1)
    for first, second in zip(one.ranks[0].epochs, two.ranks[0].epochs, strict=True):
        assert second.train_loss == pytest.approx(first.train_loss, rel=1e-2)
    assert len({rank.parameter_checksum for rank in two.ranks}) == 1


@one_gpu
def test_a_model_that_does_not_fit_is_a_row_with_what_was_held(
    host: Machine, tmp_path: Path
) -> None:
    huge = "wide_resnet:depth=28,width=10,samples=32768"
    done = _train(host, tmp_path, huge, batch=32768, steps=2)
    assert done.status == "oom", done.cause
    assert done.ranks[0].peak_memory_bytes is not None
    assert done.ranks[0].peak_memory_bytes > 2**30


@one_gpu
def test_telemetry_has_the_card_s_power_and_energy(host: Machine, tmp_path: Path) -> None:
    done = _train(host, tmp_path, steps=2000)
    assert done.status == "ok", done.cause
    assert done.folder is not None
    written = read_rows(tmp_path / done.folder / "telemetry.csv")
    assert any((row["gpu0_power_w"] or 0) > 0 for row in written)
    assert any((row["gpu0_memory_used_bytes"] or 0) > 2**28 for row in written)
    assert done.energy_joules is not None
    assert done.energy_joules > 0


@pytest.mark.alone
@two_gpus
@pytest.mark.parametrize("action", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_frees_both_cards(host: Machine, tmp_path: Path, action: int) -> None:
    struck: list[int] = []

    def strike(progress: RunProgress) -> None:
        if progress.phase == "stepping" and progress.step > 20 and not struck:
            (path,) = (tmp_path / "measurements").iterdir()
            beat = HandoffFolder(path).reports.read_heartbeat(1)
            assert beat is not None
            struck.append(beat.pid)
            os.kill(beat.pid, action)

    before = _held_bytes()
    requested = plan(host, device="cuda", devices=2, batch=64, epochs=500, workers=1)
    options = RunOptions(results=tmp_path, on_progress=strike, hang_timeout_s=5)
    done = run(Workload.parse("digits"), requested, machine=host, options=options)
    assert struck
    assert done.status == ("killed" if action == signal.SIGKILL else "hung")
    assert done.cause is not None
    assert done.cause.rank == 1
    _wait_until_free(before)


def _held_bytes() -> list[int]:
    """What is taken of the memory of the first two cards, whoever holds it."""
    with Nvml() as nvml:
        return [card.memory_used_bytes() or 0 for card in nvml.cards()[:2]]


def _wait_until_free(before: list[int]) -> None:
    """The driver gives a dead process's memory back a moment after its end."""
    deadline = time.monotonic() + 10
    while any(now > then + FREE_BYTES for now, then in zip(_held_bytes(), before, strict=True)):
        assert time.monotonic() < deadline, f"{_held_bytes()} bytes are held, before: {before}"
        time.sleep(0.1)


@two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_conv2d_on_two_gpus_agrees_with_scipy(host: Machine, tmp_path: Path, strategy: str) -> None:
    done = _train(
        host, tmp_path, "conv2d:size=32", batch=21, steps=10, devices=2, strategy=strategy
    )
    assert done.status == "ok", done.cause
    names = {part.name for part in done.ranks[0].parts}
    assert any("end to end" in name for name in names)


@pytest.mark.alone
@one_gpu
def test_an_experiment_leaves_out_the_copies_of_conv2d(host: Machine, tmp_path: Path) -> None:
    requested = plan(host, device="cuda", batch=840, steps=20)
    found = [
        run(
            Workload.parse("conv2d"),
            requested,
            variant,
            machine=host,
            options=RunOptions(results=tmp_path),
        )
        for variant in (None, Variant(input="resident"))
    ]
    assert [one.status for one in found] == ["ok", "ok"], found[-1].cause
    whole, resident = (sum(w.seconds for w in one.ranks[0].windows) for one in found)
    assert resident < whole
    assert [part.name for part in found[1].ranks[0].parts] == ["first call", "resident"]
