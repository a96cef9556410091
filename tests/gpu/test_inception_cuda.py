"""Inception's input on a GPU: the pixels of every placement, and a captured step's losses."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from nfold.data import photographs
from nfold.data.distortion import Distorter
from nfold.errors import Unsupported
from nfold.frameworks.base import Observer, Task
from nfold.frameworks.torch.batch import Boxed
from nfold.frameworks.torch.distortion import Distortion
from nfold.frameworks.torch.input import Stream
from nfold.frameworks.torch.landing import Canvases, laid_out
from nfold.frameworks.torch.loop import train
from nfold.frameworks.torch.nvjpeg import Decoded, Files, torchvision_decode
from nfold.frameworks.torch.photographs import Photos, each_look
from nfold.plan import Plan
from nfold.telemetry.inspection import inspect_machine
from nfold.workload import Workload
from nfold.workloads import info
from photos import folders, picture

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SIZE = 75


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NFOLD_DATA", str(folders(tmp_path / "data")))
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))


def asked(**changes: object) -> Task:
    machine = inspect_machine()
    fields = {"device": "cuda", "devices": 1, "batch": 8, "workers": 0, "augment": "device"}
    plan = Plan(**{**fields, **changes})  # type: ignore[arg-type]
    return Task(
        workload=Workload.parse(f"inception_v3:size={SIZE},classes=2,repeat=4"),
        plan=plan.resolve(machine, info("inception_v3").defaults),
        machine=machine,
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_distorts_as_the_cpu_does(compiled: bool) -> None:
    ids = torch.arange(64)
    regions = [picture(20 + 3 * (i % 32), 128 - 2 * (i % 50), i) for i in range(64)]
    places = torch.tensor([region.shape[:2] for region in regions])
    pixels = torch.from_numpy(np.concatenate([region.ravel() for region in regions]))
    batch = Boxed(
        laid_out(pixels.to(CUDA), places.to(CUDA), 128), ids, ids.to(CUDA), places.to(CUDA)
    )
    distort = Distortion(SIZE, 9, CUDA)
    function = torch.compile(distort.__call__, dynamic=False) if compiled else distort
    there = function(batch, torch.tensor(2, device=CUDA)).cpu().numpy()
    here = np.empty_like(there)
    on_cpu = Distorter(SIZE)
    for row, look in enumerate(each_look(9, 2, ids)):
        on_cpu(regions[row], look, here[row])
    apart = np.abs(there.astype(int) - here)
    assert apart.mean() < 0.5
    assert (apart > 4).mean() < 1e-4


@pytest.mark.parametrize("augment", ["cpu", "device"])
def test_a_captured_step_loses_as_an_eager_one(augment: str) -> None:
    losses = [
        train(asked(step=step, augment=augment, steps=8, warmup_steps=1), Observer()).losses
        for step in ("eager", "captured")
    ]
    first, second = ([loss for _, loss in points] for points in losses)
    np.testing.assert_allclose(second[0], first[0], rtol=1e-3)
    np.testing.assert_allclose(second, first, rtol=0.2)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_nvjpeg_decodes_what_the_cpu_does() -> None:
    task = asked()
    part = photographs.load().train
    key = next(iter(Stream(len(part), task)))
    try:
        there = Decoded(SIZE, torchvision_decode())(Files(part, task, SIZE)[key], CUDA)
    except Unsupported as missing:
        pytest.skip(str(missing))
    here = Canvases(SIZE)(Photos(part, task, SIZE)[key], CUDA)
    assert torch.equal(there.tensors[3], here.tensors[3])
    for mine, theirs, (height, width) in zip(
        there.tensors[0], here.tensors[0], here.tensors[3].tolist(), strict=True
    ):
        box = np.s_[:height, :width]
        assert (mine[box].int() - theirs[box].int()).abs().float().mean() < 8
