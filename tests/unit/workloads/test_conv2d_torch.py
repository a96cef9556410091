"""The torch part on CPU devices: results against scipy, the parts, the split."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from nfold.core.errors import Mismatch
from nfold.core.plan import Plan
from nfold.workloads.conv2d import device
from nfold.workloads.conv2d.device import KernelTimer
from nfold.workloads.conv2d.problem import Array, ConvTask, scipy_reference, to_correlation
from nfold.workloads.conv2d.process import ConvResult
from nfold.workloads.conv2d.torch import (
    TorchCpuDevice,
    TorchHostBuffers,
    convolve,
    run_parts,
    to_tensor,
)

CPU = torch.device("cpu")
PLAN = Plan(
    device="cpu",
    devices=1,
    cores_per_device=1,
    strategy="single",
    batch=7,
    precision="fp32",
    layout="channels_first",
    input="loader",
    workers=0,
    augment="cpu",
    step="eager",
    steps=2,
    warmup_steps=1,
)
PARAMETERS = {"size": 12, "channels": 1, "filter": 3, "copy_only": 0}


@pytest.fixture(autouse=True)
def _small_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelTimer, "eviction_bytes", 1024)


def task(
    plan: Plan = PLAN,
    rank: int = 0,
    world_size: int = 1,
    devices: int = 1,
    barrier: Callable[[], None] = lambda: None,
    **parameters: int,
) -> ConvTask:
    return ConvTask(
        parameters={**PARAMETERS, **parameters},
        plan=plan,
        rank=rank,
        world_size=world_size,
        devices=[CPU] * devices,
        barrier=barrier,
        beat=lambda done, total: None,
    )


def names(result: ConvResult) -> list[str]:
    return [part.name for part in result.parts if not part.baseline]


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize("width", [3, 5, 10])
@pytest.mark.parametrize("channels", [1, 3])
def test_parity_with_scipy(layout: str, width: int, channels: int) -> None:
    problem = task(channels=channels, filter=width).problem
    plan = PLAN.edit(layout=layout)
    images, filters = problem.make_images(range(3)), problem.random_filter()
    found = convolve(to_tensor(images, plan), to_tensor(to_correlation(filters), plan)).numpy()
    expected = scipy_reference(images, filters)
    assert found.shape == images.shape
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("width", [3, 10])
def test_a_run_verifies_itself_in_every_precision(precision: str, width: int) -> None:
    plan = PLAN.edit(precision=precision, layout="channels_last")
    result = run_parts(task(plan, channels=2, filter=width))
    itemsize = 4 if precision == "fp32" else 2
    part = next(part for part in result.parts if part.name == "end to end")
    assert part.bytes == 2 * 7 * 2 * 12 * 12 * itemsize


def test_the_parts_of_a_cpu_device() -> None:
    result = run_parts(task())
    assert names(result) == [
        "first call",
        "copy only",
        "end to end",
        "convolution, cold cache",
        "convolution, warm cache",
        "resident loop",
    ]
    timed = [part for part in result.parts if part.name != "first call" and not part.baseline]
    assert all(len(part.seconds) == 2 for part in timed)
    assert all(part.images == 7 and part.bytes > 0 and min(part.seconds) > 0 for part in timed)
    assert [part.name.split(",")[0] for part in result.parts if part.baseline] == [
        "scipy.signal.convolve2d",
        "scipy.ndimage.convolve",
        "torch on the CPU",
    ]
    assert [(window.steps, window.samples) for window in result.windows] == [(1, 7)] * 2
    assert result.first_step_ms == 1e3 * result.parts[0].seconds[0]
    assert result.peak_memory_bytes > 0


def test_copy_only_copies_and_convolves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lane: TorchCpuDevice) -> None:
        raise AssertionError("convolved")

    monkeypatch.setattr(TorchCpuDevice, "compute", refuse)
    result = run_parts(task(copy_only=1))
    assert [part.name for part in result.parts] == ["first call", "copy only"]
    assert len(result.windows) == 2


def test_three_ranks_share_seven_images_and_only_rank_0_measures_baselines() -> None:
    plan = PLAN.edit(devices=3, strategy="ddp")
    barriers: list[list[str]] = [[], [], []]
    results = [
        run_parts(task(plan, rank, 3, barrier=partial(crossed.append, "x")))
        for rank, crossed in enumerate(barriers)
    ]
    assert [result.windows[0].samples for result in results] == [2, 2, 3]
    assert [sum(part.baseline for part in result.parts) for result in results] == [3, 0, 0]
    assert len({len(crossed) for crossed in barriers}) == 1
    assert {part.images for result in results for part in result.parts} == {7}


def test_one_process_drives_several_devices_into_one_buffer() -> None:
    plan = PLAN.edit(devices=2, strategy="dp")
    result = run_parts(task(plan, devices=2))
    assert result.windows[0].samples == 7
    assert "resident loop" in names(result)


def test_unflipped_filter_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def unturned(filters: Array) -> Array:
        return filters

    monkeypatch.setattr(device, "to_correlation", unturned)
    with pytest.raises(Mismatch, match="differs from scipy's"):
        run_parts(task())


def test_misplaced_results_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def misplaced(lane: TorchCpuDevice, host: TorchHostBuffers) -> None:
        host.results[:] = lane.result[:1]

    monkeypatch.setattr(TorchCpuDevice, "download", misplaced)
    with pytest.raises(Mismatch):
        run_parts(task())


def test_results_that_the_timed_calls_spoil_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way end to end is compared again after it was timed."""
    real, calls = TorchCpuDevice.download, [0]

    def forgetful(lane: TorchCpuDevice, host: TorchHostBuffers) -> None:
        calls[0] += 1
        real(lane, host)
        if calls[0] > 6:
            host.results[0] = 0

    monkeypatch.setattr(TorchCpuDevice, "download", forgetful)
    with pytest.raises(Mismatch, match="image 0 "):
        run_parts(task())


def test_tf32_is_off_by_default() -> None:
    run_parts(task(copy_only=1))
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
