"""How long a run will take: the nearest measurement scaled, else a rate that is said."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from made import machine
from nfold import workloads
from nfold.bench.grid import GridCell, build_grids, parse_axes
from nfold.bench.sweep import (
    ASSUMED_FLOP_PER_S,
    ASSUMED_OPERATION_PARTS,
    ASSUMED_START_S,
    estimate_duration,
)
from nfold.core.measurement import Epoch, Measurement, Status
from nfold.core.plan import Plan
from timed import rank

HOST = machine(gpus=4, cores=16)


def _cell(
    workload: str = "digits", steps: int | None = None, epochs: int | None = None, **lists: str
) -> GridCell:
    common = Plan(steps=steps, epochs=epochs, warmup_steps=0)
    axes = parse_axes(workload, {"devices": "1", **lists}, common=common)
    (cell,) = build_grids([axes], HOST, lambda *_: None).cells
    return cell


def _measurement(
    cell: GridCell, *, rate: float, wall_seconds: float, status: Status = "ok", **more: Any
) -> Measurement:
    """``rate`` samples/s on one rank."""
    samples = rank(0, [100 / rate] * 10, **more)
    return Measurement(
        id=f"at-{rate:.0f}",
        workload=cell.workload,
        plan=cell.plan,
        machine=HOST,
        status=status,
        ranks=(samples,),
        wall_seconds=wall_seconds,
    )


def test_the_same_plan_takes_as_long_as_it_took() -> None:
    cell = _cell(steps=100, batch="50")
    found = estimate_duration(cell, [_measurement(cell, rate=1000, wall_seconds=12)])
    assert found.seconds == pytest.approx(12)
    assert found.basis == "measured as at-1000"


def test_only_the_stepping_grows_with_the_steps() -> None:
    """5,000 samples at 1,000 a second are 5 s of the 12; ten times of them are 50."""
    short, long = _cell(steps=100, batch="50"), _cell(steps=1000, batch="50")
    found = estimate_duration(long, [_measurement(short, rate=1000, wall_seconds=12)])
    assert found.seconds == pytest.approx(7 + 50)


def test_more_epochs_and_more_devices_are_scaled() -> None:
    one, many = _cell(epochs=2), _cell(epochs=6, devices="2")
    epoch = Epoch(seconds=3.0, samples=3000, train_loss=1.0)
    measured = _measurement(one, rate=1000, wall_seconds=10, epochs=(epoch, epoch))
    assert estimate_duration(many, [measured]).seconds == pytest.approx(4 + 3 * 6 / 2)


def test_the_nearest_plan_decides() -> None:
    asked = _cell(steps=100, batch="64")
    near = _measurement(_cell(steps=50, batch="48"), rate=100, wall_seconds=30)
    batch = _measurement(_cell(steps=100, batch="512"), rate=900, wall_seconds=30)
    bf16 = _measurement(_cell(steps=100, batch="48", precision="bf16"), rate=500, wall_seconds=30)
    for earlier in ([near, batch, bf16], [bf16, batch, near]):
        assert estimate_duration(asked, earlier).basis == "measured as at-100"


def test_another_input_is_one_difference() -> None:
    """Augmentation and loader workers follow it; two other fields make a plan further off."""
    asked = _cell(steps=100, batch="64", input="resident")
    by_loader = _cell(steps=100, batch="64", input="loader", step="captured")
    loader = _measurement(by_loader, rate=100, wall_seconds=30)
    assert set(asked.plan.diff(loader.plan)) == {"input", "augment", "workers"}
    slow = _cell(steps=100, batch="64", input="resident", precision="bf16")
    other = _measurement(slow, rate=500, wall_seconds=30)
    for earlier in ([loader, other], [other, loader]):
        assert estimate_duration(asked, earlier).basis == "measured as at-100"


def test_failed_and_foreign_measurements_say_nothing() -> None:
    cell = _cell(steps=100, batch="50")
    failed = _measurement(cell, rate=1000, wall_seconds=12, status="oom")
    other = _measurement(_cell("mnist", steps=100, batch="50"), rate=1000, wall_seconds=12)
    virtual = _measurement(
        _cell(steps=100, batch="50", framework="simulated"), rate=10, wall_seconds=1
    )
    assert "rough" in estimate_duration(cell, [failed, other, virtual]).basis


def test_a_measurement_without_windows_is_taken_as_it_is() -> None:
    cell = _cell(steps=100, batch="50")
    bare = dataclasses.replace(_measurement(cell, rate=10, wall_seconds=33), ranks=())
    assert estimate_duration(cell, [bare]).seconds == 33


@pytest.mark.parametrize(("devices", "share"), [("cpu:1", 16), ("cpu:4", 16)])
def test_without_a_measurement_operations_over_an_assumed_rate(devices: str, share: int) -> None:
    cell = _cell("cnn10:samples=1000", epochs=2, devices=devices)
    flop = workloads.info("cnn10").flop_per_sample(workloads.parameters(cell.workload))
    found = estimate_duration(cell, [])
    expected = ASSUMED_START_S["cpu"] + 2000 * flop / (ASSUMED_FLOP_PER_S["cpu"] * share)
    assert found.seconds == pytest.approx(expected)
    assert found.basis == "rough: assumes 20 GFLOP/s a core"


@pytest.mark.parametrize(
    ("workload", "samples"), [("digits", 1437), ("mnist", 60_000), ("cnn10", 50_000)]
)
def test_an_epoch_is_as_long_as_the_published_training_set(workload: str, samples: int) -> None:
    one, three = (estimate_duration(_cell(workload, epochs=n), []).seconds for n in (1, 3))
    flop = workloads.info(workload).flop_per_sample({})
    assert three - one == pytest.approx(2 * samples * flop / ASSUMED_FLOP_PER_S["cuda"])


def test_an_epoch_that_was_prepared_is_as_long_as_it_is() -> None:
    """A folder of 385 photographs is no ImageNet, measured or not."""
    cell = _cell("inception_v3", epochs=2, batch="77")
    ran = _measurement(_cell("inception_v3", steps=10, batch="77"), rate=77, wall_seconds=30)
    assert estimate_duration(cell, [ran], lambda _: 385).seconds == pytest.approx(20 + 10)
    assert (
        estimate_duration(cell, [], lambda _: 385).seconds
        < 0.01 * estimate_duration(cell, []).seconds
    )


def test_sixteen_bits_are_assumed_to_be_faster_on_a_gpu() -> None:
    full = estimate_duration(_cell("cnn10", epochs=50), [])
    half = estimate_duration(_cell("cnn10", epochs=50, precision="bf16"), [])
    assert half.seconds < full.seconds
    assert (full.basis, half.basis) == (
        "rough: assumes 10 TFLOP/s a GPU",
        "rough: assumes 30 TFLOP/s a GPU",
    )


def test_an_operation_is_timed_in_several_parts() -> None:
    cell = _cell("conv2d", steps=1000)
    flop = workloads.info("conv2d").flop_per_sample(workloads.parameters(cell.workload))
    samples = ASSUMED_OPERATION_PARTS * 1000 * 840
    expected = ASSUMED_START_S["cuda"] + samples * flop / ASSUMED_FLOP_PER_S["cuda"]
    assert estimate_duration(cell, []).seconds == pytest.approx(expected)


def test_what_does_not_run_or_runs_on_a_virtual_clock_takes_no_time() -> None:
    refused = dataclasses.replace(_cell(), unsupported_reason="planted")
    assert estimate_duration(refused, []).seconds == 0
    assert estimate_duration(_cell(framework="simulated"), []).basis == "a virtual clock"
