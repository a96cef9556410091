"""JPEG files decoded on the device, with a decoder of the host in its place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from made import machine
from nfold.core.errors import Unsupported
from nfold.core.plan import Plan, WorkloadDefaults
from nfold.core.workload import Workload
from nfold.data import photographs
from nfold.data.packed_jpegs import decode_jpeg, decode_with_pillow, verified_size
from nfold.engines.base import Task
from nfold.engines.torch.framework import TorchFramework
from nfold.engines.torch.input.dataloader import BatchKeySampler
from nfold.engines.torch.input.image_files import (
    CanvasTransfer,
    ImageBatches,
    JpegBatches,
    NvjpegTransfer,
    torchvision_decoder,
)
from photos import SIZES, folders, jpeg

CPU = torch.device("cpu")
SIZE = 75


def on_host(files: Sequence[Tensor], _device: torch.device) -> list[Tensor]:
    images = []
    for file in files:
        encoded = file.numpy()
        images.append(torch.from_numpy(decode_jpeg(encoded, *verified_size(encoded.tobytes()))))
    return [image.permute(2, 0, 1) for image in images]


def test_canvases_are_those_of_a_decoder_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NFOLD_DATA", str(folders(tmp_path / "data")))
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))
    part = photographs.load().train
    plan = Plan(device="cpu", devices=1, batch=8, augment="device").resolve(
        machine(cores=1), WorkloadDefaults(batch=8, epochs=1, encoded=True)
    )
    task = Task(workload=Workload(name="inception_v3"), plan=plan, machine=machine(cores=1))
    (key,) = BatchKeySampler(len(SIZES), task)
    there = NvjpegTransfer(SIZE, on_host)(JpegBatches(part, task, SIZE)[key], CPU)
    here = CanvasTransfer(SIZE)(ImageBatches(part, task, SIZE)[key], CPU)
    for mine, theirs in zip(there.tensors[1:], here.tensors[1:], strict=True):
        assert torch.equal(mine, theirs)
    places = here.tensors[3].tolist()
    for mine, theirs, (height, width) in zip(
        there.tensors[0], here.tensors[0], places, strict=True
    ):
        box = np.s_[:height, :width]
        assert (mine[box].int() - theirs[box].int()).abs().float().mean() < 6
    assert (there.sample_hash, there.count) == (here.sample_hash, here.count)


def test_a_missing_torchvision_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    with pytest.raises(Unsupported, match=r"torchvision cannot be imported.*--decode cpu"):
        torchvision_decoder()


def fake_torchvision(monkeypatch: pytest.MonkeyPatch, decode: object) -> None:
    io = SimpleNamespace(decode_jpeg=decode, ImageReadMode=SimpleNamespace(RGB="RGB"))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(io=io))
    monkeypatch.setitem(sys.modules, "torchvision.io", io)


def test_a_torchvision_without_nvjpeg_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: object, **__: object) -> None:
        raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support")

    fake_torchvision(monkeypatch, decode)
    with pytest.raises(Unsupported, match=r"without nvJPEG; next: --decode cpu"):
        torchvision_decoder()([torch.zeros(4, dtype=torch.uint8)], CPU)


def test_a_file_that_nvjpeg_does_not_know_is_decoded_by_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cmyk, plain = (
        torch.from_numpy(np.frombuffer(jpeg(20, 30, mode=mode), np.uint8).copy())
        for mode in ("CMYK", "RGB")
    )

    def decode(given: Tensor | list[Tensor], *, mode: str, device: torch.device) -> Tensor:
        assert (mode, device) == ("RGB", CPU)
        if isinstance(given, list) or given is cmyk:
            raise RuntimeError("Failed to decode jpeg: 4 channels")
        return torch.full((3, 20, 30), 7, dtype=torch.uint8)

    fake_torchvision(monkeypatch, decode)
    one_device, together = torchvision_decoder()([cmyk, plain], CPU)
    expected = decode_with_pillow(cmyk.numpy(), 20, 30, 1)
    assert np.array_equal(one_device.permute(1, 2, 0).numpy(), expected)
    assert bool((together == 7).all())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decode": "device", "augment": "cpu"}, "augmented on the device"),
        ({"decode": "device", "augment": "device", "device": "cpu"}, "needs a GPU"),
        ({"decode": "device", "augment": "device", "cache": "decoded"}, "leaves nothing"),
        ({"input": "resident", "decode": "device"}, "decoded once, on the host"),
    ],
)
def test_what_placements_cannot_be(changes: dict[str, str], reason: str) -> None:
    host = machine(gpus=1)
    plan = Plan(**{"device": "cuda", **changes}).resolve(  # type: ignore[arg-type]
        host, WorkloadDefaults(batch=8, epochs=1, encoded=True)
    )
    refusal = TorchFramework().unsupported_reason(Workload(name="inception_v3"), plan, host)
    assert refusal is not None
    assert reason in refusal


@pytest.mark.parametrize(
    "changes", [{"decode": "cpu"}, {"cache": "decoded"}, {"bad_images": "skip"}]
)
def test_other_workloads_have_no_files(changes: dict[str, str]) -> None:
    plan = Plan(device="cpu", **changes).resolve(machine(), WorkloadDefaults(batch=8, epochs=1))  # type: ignore[arg-type]
    refusal = TorchFramework().unsupported_reason(Workload(name="digits"), plan, machine())
    assert refusal == f"{next(iter(changes))}: digits has no image files to decode"
