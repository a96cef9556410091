"""conv2d on GPUs: every part is there, and the results equal scipy's."""

from __future__ import annotations

import pytest
import torch

from nfold.core.plan import Plan
from nfold.workloads.conv2d import torch as conv2d_torch
from nfold.workloads.conv2d.problem import ConvTask, check_result, scipy_reference
from nfold.workloads.conv2d.process import ConvResult
from nfold.workloads.conv2d.torch import (
    FASTEST,
    TorchCudaDevice,
    TorchCudaKernelTimer,
    TorchHostBuffers,
    candidates,
    run_parts,
    to_tensor,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def task(devices: int, precision: str, layout: str, batch: int = 50, **parameters: int) -> ConvTask:
    plan = Plan(
        device="cuda",
        devices=devices,
        cores_per_device=1,
        strategy="single" if devices == 1 else "dp",
        batch=batch,
        precision=precision,
        layout=layout,
        input="loader",
        workers=0,
        augment="cpu",
        step="eager",
        steps=4,
        warmup_steps=2,
    )
    defaults = {"size": 40, "channels": 1, "filter": 3, "copy_only": 0}
    return ConvTask(
        parameters={**defaults, **parameters},
        plan=plan,
        rank=0,
        world_size=1,
        devices=[torch.device("cuda", index) for index in range(devices)],
        barrier=lambda: None,
        beat=lambda done, total: None,
    )


def run(devices: int, precision: str, layout: str, **parameters: int) -> ConvResult:
    return run_parts(task(devices, precision, layout, **parameters))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize("width", [3, 5, 10])
@pytest.mark.parametrize("channels", [1, 10])
def test_every_form_agrees_with_scipy(
    precision: str, layout: str, width: int, channels: int
) -> None:
    result = run(1, precision, layout, filter=width, channels=channels)
    assert len(result.windows) == 4


def test_the_parts_of_a_gpu() -> None:
    result = run(1, "fp32", "channels_first")
    assert [part.name for part in result.parts if not part.baseline] == [
        "first call",
        "copy to device, pageable",
        "copy to device, pinned",
        "copy from device, pageable",
        "copy from device, pinned",
        "copy only, pageable",
        "copy only, pinned",
        "end to end, pageable",
        "end to end, pinned",
        "convolution, cold cache",
        "convolution, warm cache",
        "resident loop",
    ]
    assert all(min(part.seconds) > 0 for part in result.parts)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_process_drives_two_gpus() -> None:
    assert run(2, "fp32", "channels_first").windows[0].samples == 50


def lane_of(
    precision: str = "fp32", layout: str = "channels_first", images: int = 210, **changes: int
) -> TorchCudaDevice:
    """A lane on the first GPU with images of 100 × 100, uploaded, and random filters."""
    own = task(1, precision, layout, images, **{"size": 100, **changes})
    values = to_tensor(own.problem.make_images(range(images)), own.plan)
    host = TorchHostBuffers(images=values, results=torch.empty_like(values))
    lane = TorchCudaDevice(own, 0, host)
    with lane.work():
        lane.set_filters(own.problem.random_filter())
        lane.upload(host)
    lane.finish()
    return lane


def host_of(lane: TorchCudaDevice) -> TorchHostBuffers:
    images = lane.input.cpu()
    return TorchHostBuffers(images=images, results=torch.full_like(images, torch.nan))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 10])
@pytest.mark.parametrize(("channels", "size"), [(1, 100), (1, 37), (10, 41), (3, 20)])
def test_every_variant_of_our_kernel_is_scipys(
    precision: str, width: int, channels: int, size: int
) -> None:
    pytest.importorskip("triton")
    torch.backends.cudnn.allow_tf32 = False
    lane = lane_of(precision, images=7, channels=channels, size=size, filter=width)
    found = candidates(lane.input, lane.filters)
    assert len(found) > 2
    images = lane.input.float().cpu().numpy()
    expected = scipy_reference(images, lane.problem.random_filter())
    for method in found.values():
        out = torch.full_like(lane.input, torch.nan)
        results = method(lane.input, lane.filters, out)
        check_result(results.float().cpu().numpy(), expected, range(7), precision)


def test_only_cudnn_takes_channels_that_are_last() -> None:
    lane = lane_of(layout="channels_last", images=7, channels=10)
    assert list(candidates(lane.input, lane.filters)) == ["cuDNN"]


def test_the_search_is_made_once_and_its_choice_is_named() -> None:
    lane = lane_of(images=840)
    with lane.work():
        lane.compute()
    lane.finish()
    before = dict(FASTEST)
    assert lane.method in candidates(lane.input, lane.filters)
    again = lane_of(images=840)
    with again.work():
        again.compute()
    again.finish()
    assert before == FASTEST


@pytest.mark.parametrize("ours", [False, True])
def test_a_replayed_chain_is_the_chain(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    lane = lane_of()
    choose(monkeypatch, lane, ours)
    timer = TorchCudaKernelTimer(lane)
    with lane.work():
        expected = timer.launch_chain().clone()
        recorded = timer.chain_graph[1]
        for _ in range(2):
            recorded.zero_()
            timer.iterate()
            lane.finish()
            torch.testing.assert_close(recorded, expected, rtol=1e-5, atol=1e-6)
        reading = timer.resident()
    lane.finish()
    assert 1e-6 < reading() < 1e-3


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("copy_only", [False, True])
def test_the_way_in_chunks_replayed_is_the_plain_way(
    monkeypatch: pytest.MonkeyPatch, ours: bool, copy_only: bool
) -> None:
    lane = lane_of(images=211)
    choose(monkeypatch, lane, ours)
    plain, pinned = host_of(lane), host_of(lane).pinned()
    assert "8 chunks" in lane.overlap(pinned)
    assert lane.overlap(plain) == ""
    for host in (plain, *[pinned] * 5):
        host.fill_nan()
        with lane.work():
            lane.input.fill_(torch.nan)
            for step in lane.round_trip(host, copy_only):
                step()
        lane.finish()
        if copy_only:
            assert torch.equal(host.results, host.images)
        else:
            torch.testing.assert_close(host.results, plain.results, rtol=0, atol=1e-5)


def choose(monkeypatch: pytest.MonkeyPatch, lane: TorchCudaDevice, ours: bool) -> None:
    """Take cuDNN, or the first variant of our kernel, without a search."""
    if ours:
        pytest.importorskip("triton")
    method = list(candidates(lane.input, lane.filters).items())[int(ours)]
    monkeypatch.setattr(conv2d_torch, "fastest_method", lambda images, filters, out: method)
