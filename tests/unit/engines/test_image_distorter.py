"""Photographs distorted on the host: equal to PyTorch's workers, on any number of threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from made import machine
from nfold.core.errors import DataCorrupt
from nfold.core.plan import Plan, WorkloadDefaults
from nfold.core.workload import Workload
from nfold.data import photographs
from nfold.engines.base import Task
from nfold.engines.builtin_workloads import CanvasDecoder, ImageDistorter, draw_distortions
from nfold.engines.torch.input.dataloader import BatchKey
from nfold.engines.torch.input.image_files import CanvasTransfer, ImageBatches
from nfold.engines.torch.input.preprocessing import DeviceDistortion
from photos import SIZES, folders

SIZE = 75
IDS = np.array([3, 0, 2 * len(SIZES) + 5, 7, 6])


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> photographs.PhotographSet:
    monkeypatch.setenv("NFOLD_DATA", str(folders(tmp_path / "data")))
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))
    return photographs.load()


@pytest.mark.parametrize("threads", [0, 3])
def test_the_images_are_those_of_pytorchs_workers(
    found: photographs.PhotographSet, threads: int
) -> None:
    requested = Plan(device="cpu", batch=4, seed=9, augment="cpu")
    plan = requested.resolve(machine(), WorkloadDefaults(batch=4, epochs=1, encoded=True))
    task = Task(workload=Workload(name="inception_v3"), plan=plan, machine=machine())
    key = BatchKey(epoch=2, ids=IDS, count=len(IDS), global_count=len(IDS))
    expected = ImageBatches(found.train, task, SIZE)[key].tensors[0].numpy()
    images = ImageDistorter(found.train, 9, SIZE, threads)(2, IDS)
    np.testing.assert_array_equal(images, expected)
    assert len({image.tobytes() for image in images}) == len(IDS)


@pytest.mark.parametrize("threads", [0, 3])
def test_what_a_device_distorts_is_what_pytorchs_workers_hand_out(
    found: photographs.PhotographSet, threads: int
) -> None:
    requested = Plan(device="cpu", batch=4, seed=9, augment="device")
    plan = requested.resolve(machine(), WorkloadDefaults(batch=4, epochs=1, encoded=True))
    task = Task(workload=Workload(name="inception_v3"), plan=plan, machine=machine())
    key = BatchKey(epoch=2, ids=IDS, count=len(IDS), global_count=len(IDS))
    _, _, ids, places = ImageBatches(found.train, task, SIZE)[key].tensors
    expected = CanvasTransfer(SIZE)(
        ImageBatches(found.train, task, SIZE)[key], torch.device("cpu")
    ).tensors[0]
    canvases, marks = CanvasDecoder(found.train, 9, SIZE, threads)(2, IDS)
    assert marks.tolist() == torch.column_stack([ids, places]).tolist()
    for mine, theirs, (height, width) in zip(
        canvases, expected.numpy(), places.tolist(), strict=True
    ):
        np.testing.assert_array_equal(mine[:height, :width], theirs[:height, :width])


def test_looks_are_those_of_a_device() -> None:
    ids = np.arange(200)
    here, there = (
        draw_distortions(2**40 + 1, 3, ids),
        DeviceDistortion(SIZE, 2**40 + 1, torch.device("cpu")).parameters(3, torch.from_numpy(ids)),
    )
    for name, column in vars(there).items():
        assert column.tolist() == [getattr(look, name) for look in here], name


def test_an_error_of_a_thread_reaches_the_step(found: photographs.PhotographSet) -> None:
    part = found.train
    wrong = np.zeros_like(part.encoded)
    spoilt = type(part)(**{**vars(part), "encoded": wrong})
    with pytest.raises(DataCorrupt, match="cannot be decoded"):
        ImageDistorter(spoilt, 0, SIZE, 2)(0, IDS)
