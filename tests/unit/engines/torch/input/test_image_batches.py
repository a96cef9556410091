"""Batches of photographs: the same pixels in every placement and on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from made import machine
from nfold.core.plan import Plan, WorkloadDefaults
from nfold.core.workload import Workload
from nfold.data import photographs
from nfold.data.arrays import DataSetArrays
from nfold.data.distortion import photograph_arrays
from nfold.data.photographs import PhotographSet, decode_all
from nfold.engines.base import Task
from nfold.engines.builtin_workloads import load_photographs
from nfold.engines.torch.batch import Batch
from nfold.engines.torch.devices import Devices
from nfold.engines.torch.input.batch_source import build_image_preparation, build_image_source
from nfold.engines.torch.input.preprocessing import build_normalizer
from nfold.workloads import parameters
from photos import SIZES, folders

CPU = torch.device("cpu")
SIZE = 75


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NFOLD_DATA", str(folders(tmp_path / "data")))
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))


def requested(*, rank: int = 0, ranks: int = 1, repeat: int = 1, **changes: object) -> Task:
    plan = Plan(**{"device": "cpu", "devices": ranks, "batch": 4, "epochs": 1, **changes})  # type: ignore[arg-type]
    host = machine(cores=2)
    workload = Workload.parse(f"inception_v3:size={SIZE},classes=2,repeat={repeat}")
    complete = plan.resolve(host, WorkloadDefaults(batch=4, epochs=1, encoded=True))
    return Task(
        workload=workload,
        plan=complete,
        machine=host,
        rank=rank,
        local_rank=rank,
        world_size=ranks,
    )


def made_of(task: Task) -> tuple[PhotographSet, DataSetArrays]:
    """What a definition has of them, without a model."""
    chosen = parameters(task.workload)
    found = load_photographs(task.plan, chosen)
    return found, photograph_arrays(found, chosen)


def images_of(task: Task) -> dict[int, Tensor]:
    """What the model would see of every sample, by its place in the epoch."""
    found, arrays = made_of(task)
    normalize = build_normalizer(arrays, "channels_first", CPU)
    devices = Devices((CPU,))
    source = build_image_source(found, arrays, task, devices)
    prepare = build_image_preparation(arrays, task, normalize, devices)
    images_at: dict[int, Tensor] = {}
    for step, batch in enumerate(source):
        images = prepare(source.unpack(batch.tensors), torch.tensor(batch.epoch))
        assert images.shape[1:] == (3, SIZE, SIZE)
        first = step * 4 + task.rank * 2
        images_at |= {first + row: image for row, image in enumerate(images[: batch.count])}
    return images_at


def apart(one: dict[int, Tensor], other: dict[int, Tensor]) -> Tensor:
    """Differences in levels of 255."""
    assert set(one) == set(other)
    return torch.stack([(one[at] - other[at]).abs() * 127.5 for at in one])


def test_both_placements_show_the_same_images() -> None:
    difference = apart(images_of(requested(augment="cpu")), images_of(requested(augment="device")))
    assert difference.mean() < 0.5
    assert difference.max() < 6


@pytest.mark.parametrize("augment", ["cpu", "device"])
def test_two_ranks_see_what_one_sees(augment: str) -> None:
    one_device = images_of(requested(augment=augment))
    both: dict[int, Tensor] = {}
    for rank in range(2):
        both |= images_of(requested(augment=augment, rank=rank, ranks=2))
    assert apart(one_device, both).max() < 1e-3


def test_a_cache_of_decoded_images_changes_no_pixel() -> None:
    plain = images_of(requested(augment="cpu"))
    decode_all(photographs.load().train)
    assert apart(plain, images_of(requested(augment="cpu", cache="decoded"))).max() == 0


def test_a_photograph_that_is_repeated_is_distorted_anew() -> None:
    task = requested(augment="cpu", repeat=3)
    _, arrays = made_of(task)
    assert len(arrays.train_labels) == 3 * len(SIZES)
    images = images_of(task)
    distinct = {image.numpy().tobytes() for image in images.values()}
    assert len(distinct) == len(images) == 3 * len(SIZES)


def test_an_epoch_draws_anew() -> None:
    task = requested(augment="cpu")
    found, arrays = made_of(task)
    source = build_image_source(found, arrays, task, Devices((CPU,)))
    first: list[Batch] = list(source)
    source.epoch = 1
    assert not torch.equal(first[0].tensors[0], next(iter(source)).tensors[0])


def test_workers_hand_over_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    here = images_of(requested(augment="device"))
    assert apart(here, images_of(requested(augment="device", workers=1))).max() == 0


def test_skipped_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "data/train/class0/bad.jpg").write_bytes(b"no")
    task = requested(bad_images="skip")
    found, arrays = made_of(task)
    source = build_image_source(found, arrays, task, Devices((CPU,)))
    ((kind, text),) = source.notes
    assert kind == "bad_images"
    assert "bad.jpg" in text


def test_a_test_set_is_seen_through_its_middle(tmp_path: Path) -> None:
    place = tmp_path / "data"
    folders(place / "aside", sizes=SIZES[:3])
    (place / "aside/train").rename(place / "val")
    (place / "aside").rmdir()
    _, arrays = made_of(requested())
    images = arrays.test_images[0:2]
    assert images.shape == (2, SIZE, SIZE, 3)
    assert images.dtype == np.uint8
    assert arrays.test_labels.tolist() == [0, 0, 1]
