"""Inception's input on a GPU: pixels of every placement, and losses of a captured step."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nfold.cli.plan_completion import measure_rates
from nfold.core.errors import Unsupported
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.data import photographs
from nfold.data.distortion import Distorter
from nfold.engines.base import Observer, Task
from nfold.engines.builtin_workloads import draw_distortions as each_look
from nfold.engines.torch.batch import CanvasTensors
from nfold.engines.torch.input.dataloader import BatchKeySampler
from nfold.engines.torch.input.image_files import (
    CanvasTransfer,
    ImageBatches,
    JpegBatches,
    NvjpegTransfer,
    PackedImages,
    crop_to_canvases,
    fill_canvases,
    torchvision_decoder,
)
from nfold.engines.torch.input.preprocessing import DeviceDistortion
from nfold.engines.torch.torch_workload import TorchWorkload, load_workload
from nfold.engines.torch.trainer import train
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.workloads import info
from photos import folders, jpeg, picture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda", 0)
SIZE = 75
APART = 0.002
"""Between losses of a linear model over the same boxes, whoever decoded and distorted them: 0.0005
on a CPU. Over other boxes they are 0.05 and more apart.
"""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NFOLD_DATA", str(folders(tmp_path / "data")))
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))


def requested(**changes: object) -> Task:
    machine = inspect_machine()
    fields = {"device": "cuda", "devices": 1, "batch": 8, "workers": 0, "augment": "device"}
    plan = Plan(**{**fields, **changes})  # type: ignore[arg-type]
    return Task(
        workload=Workload.parse(f"inception_v3:size={SIZE},classes=2,repeat=4"),
        plan=plan.resolve(machine, info("inception_v3").defaults),
        machine=machine,
    )


def linear(task: Task) -> TorchWorkload:
    """A model whose losses say what it was given: batch norm of 8 samples makes much of a bit."""
    torch.manual_seed(task.plan.seed)
    model = nn.Sequential(nn.AvgPool2d(5), nn.Flatten(), nn.Linear(3 * (SIZE // 5) ** 2, 2))

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.01)

    return dataclasses.replace(load_workload(task), model=model, optimizer=optimizer)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_distorts_as_the_cpu_does(compiled: bool) -> None:
    ids = torch.arange(64)
    regions = [picture(20 + 3 * (i % 32), 128 - 2 * (i % 50), i) for i in range(64)]
    places = torch.tensor([region.shape[:2] for region in regions])
    pixels = torch.from_numpy(np.concatenate([region.ravel() for region in regions]))
    batch = CanvasTensors(
        fill_canvases(pixels.to(CUDA), places.to(CUDA), 128), ids, ids.to(CUDA), places.to(CUDA)
    )
    distort = DeviceDistortion(SIZE, 9, CUDA)
    function = torch.compile(distort.__call__, dynamic=False) if compiled else distort
    there = function(batch, torch.tensor(2, device=CUDA)).cpu().numpy()
    here = np.empty_like(there)
    on_cpu = Distorter(SIZE)
    for row, look in enumerate(each_look(9, 2, ids.cpu().numpy())):
        on_cpu(regions[row], look, here[row])
    apart = np.abs(there.astype(int) - here)
    assert apart.mean() < 0.5
    assert (apart > 4).mean() < 1e-4


def test_a_captured_distortion_draws_the_next_epoch_as_an_eager_one() -> None:
    ids = torch.arange(8, device=CUDA)
    canvases = torch.randint(256, (8, 128, 128, 3), dtype=torch.uint8, device=CUDA)
    batch = CanvasTensors(canvases, ids, ids, torch.full((8, 2), 97, device=CUDA))
    distort = DeviceDistortion(SIZE, 3, CUDA)
    epoch = torch.zeros((), dtype=torch.int64, device=CUDA)
    stream = torch.cuda.Stream(CUDA)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        distort(batch, epoch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = distort(batch, epoch)
    images = []
    for number in range(2):
        epoch.fill_(number)
        graph.replay()
        images.append(made.clone())
        assert torch.equal(images[-1], distort(batch, torch.tensor(number, device=CUDA)))
    assert not torch.equal(*images)


@pytest.mark.parametrize("step", ["captured", "compiled+captured"])
@pytest.mark.parametrize("augment", ["cpu", "device"])
def test_a_captured_step_trains_as_an_eager_one(augment: str, step: str) -> None:
    eager, captured = (
        train(requested(step=way, augment=augment, steps=8, warmup_steps=1), Observer(), linear)
        for way in ("eager", step)
    )
    assert captured.sample_hashes == eager.sample_hashes
    assert len(captured.losses) == 9
    for mine, theirs in zip(captured.losses, eager.losses, strict=True):
        assert mine == pytest.approx(theirs, abs=APART)


@pytest.mark.parametrize("step", ["captured", "compiled+captured"])
def test_a_captured_inception_trains_on_the_samples_of_an_eager_one(step: str) -> None:
    """Its losses, of 8 samples at a time, are another thing with every other last bit."""
    eager, captured = (
        train(requested(step=way, steps=8, warmup_steps=1), Observer()) for way in ("eager", step)
    )
    assert captured.sample_hashes == eager.sample_hashes
    assert len(captured.losses) == len(eager.losses) == 9
    assert all(0 < loss < 100 for _, loss in captured.losses)


def test_a_process_measures_what_workers_decoder_and_device_make() -> None:
    photographs.load()
    found = measure_rates(requested(decode="cpu"))
    assert found.worker.low > 0
    assert found.device is not None
    assert found.device > 0
    if find_spec("torchvision") is None:
        assert found.decoder is None


def test_boxes_are_cut_out_on_a_gpu_as_on_the_cpu() -> None:
    sizes = [(60 + 7 * i, 200 - 5 * i) for i in range(16)]
    images = [torch.from_numpy(picture(*size).transpose(2, 0, 1).copy()) for size in sizes]
    boxes = torch.tensor([(2, 3, 15, 10, (1, 1, 2, 4)[i % 4]) for i in range(16)])
    there = crop_to_canvases(PackedImages.pack([image.to(CUDA) for image in images]), boxes, 32)
    here = crop_to_canvases(PackedImages.pack(images), boxes, 32)
    assert (there.cpu().int() - here.int()).abs().max() <= 1


def test_resident_photographs_train_in_a_graph_as_those_of_a_loader() -> None:
    fields = {"step": "captured", "steps": 8, "warmup_steps": 1}
    loaded, resident = (
        train(requested(input=input_, **fields), Observer(), linear)
        for input_ in ("loader", "resident")
    )
    assert resident.sample_hashes == loaded.sample_hashes
    assert len(resident.losses) == 9
    for mine, theirs in zip(resident.losses, loaded.losses, strict=True):
        assert mine == pytest.approx(theirs, abs=APART)
    assert resident.data_bytes


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_nvjpeg_decodes_what_the_cpu_does() -> None:
    task = requested()
    part = photographs.load().train
    key = next(iter(BatchKeySampler(len(part), task)))
    try:
        there = NvjpegTransfer(SIZE, torchvision_decoder())(
            JpegBatches(part, task, SIZE)[key], CUDA
        )
    except Unsupported as missing:
        pytest.skip(str(missing))
    here = CanvasTransfer(SIZE)(ImageBatches(part, task, SIZE)[key], CUDA)
    assert torch.equal(there.tensors[3], here.tensors[3])
    for mine, theirs, (height, width) in zip(
        there.tensors[0], here.tensors[0], here.tensors[3].tolist(), strict=True
    ):
        box = np.s_[:height, :width]
        assert (mine[box].int() - theirs[box].int()).abs().float().mean() < 8


@pytest.mark.skipif(find_spec("torchvision") is None, reason="no torchvision")
def test_consecutive_decoded_batches_do_not_overwrite_each_other() -> None:
    """The decoder's stream waits for no rank: memory of the batch before may still be read."""
    decode = torchvision_decoder()
    files = [torch.frombuffer(bytearray(jpeg(400, 500, i)), dtype=torch.uint8) for i in range(32)]
    boxes = torch.tensor([(3 * i, 5 * i, 90, 128, 1) for i in range(32)])
    one_device = crop_to_canvases(PackedImages.pack(decode(files, CUDA)), boxes, 128).cpu()
    laid = []
    stream = torch.cuda.Stream(CUDA)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(40):
            laid.append(crop_to_canvases(PackedImages.pack(decode(files, CUDA)), boxes, 128))
    torch.cuda.synchronize()
    assert all(torch.equal(canvases.cpu(), one_device) for canvases in laid)
