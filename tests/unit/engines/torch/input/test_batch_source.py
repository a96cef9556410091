"""Placements of data and augmentation give the model the same numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from made import arrays, task
from nfold import data
from nfold.core.errors import OutOfMemory
from nfold.core.machine import GpuInfo
from nfold.engines.base import Task
from nfold.engines.torch.devices import Devices
from nfold.engines.torch.input import batch_source as sources
from nfold.engines.torch.input import device_dataset
from nfold.engines.torch.input.batch_source import build_preparation, build_source
from nfold.engines.torch.input.dataloader import LoaderSource
from nfold.engines.torch.input.device_dataset import ResidentSource
from nfold.engines.torch.input.preprocessing import Normalizer
from nfold.engines.torch.trainer import Trainer

CPU = Devices((torch.device("cpu"),))
OPERATIONS = (("crop", 2), ("flip", 0), ("cutout", 3))
PLACEMENTS: tuple[dict[str, Any], ...] = (
    {"input": "loader", "augment": "cpu"},
    {"input": "loader", "augment": "device"},
    {"input": "loader", "augment": "device", "workers": 2},
    {"input": "resident", "augment": "device"},
)


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of several has no process group here: all have as much memory as it."""
    monkeypatch.setattr(device_dataset, "all_reduce_min", lambda value, *_: value)


Step = tuple[Tensor, Tensor, tuple[int, int, int]]


def _steps(requested: Task, epoch: int = 2) -> list[Step]:
    """What the model gets in each step, its labels, and what the step counts."""
    made = arrays(103)
    normalize = Normalizer(made, "channels_first", CPU.primary)
    prepare = build_preparation(made, requested, OPERATIONS, normalize, CPU)
    batches = build_source(made, requested, OPERATIONS, CPU)
    batches.epoch = epoch
    found = [(batches.unpack(b.tensors), b) for b in batches]
    counts = [(b.count, b.global_count, b.sample_hash) for _, b in found]
    drawn = [prepare(s, torch.as_tensor(b.epoch)) for s, b in found]
    return list(zip(drawn, [s.labels for s, _ in found], counts, strict=True))


@pytest.mark.parametrize("placement", PLACEMENTS[1:], ids=str)
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2), (3, 4)])
@pytest.mark.parametrize("length", [{"epochs": 3}, {"steps": 9, "warmup_steps": 2}], ids=str)
def test_every_placement_gives_what_loader_and_cpu_give(
    placement: dict[str, Any], rank: int, ranks: int, length: dict[str, int]
) -> None:
    """Batches of 34 of 103 samples: they do not divide, and the last one is a single sample."""
    fields: dict[str, Any] = {"batch": 34, "rank": rank, "world_size": ranks, **length}
    plain = _steps(task(**fields, **PLACEMENTS[0]))
    placed = _steps(task(**fields, **placement))
    assert len(plain) == (4 if "epochs" in length else 11)
    for (images, labels, counts), (others, theirs, counted) in zip(plain, placed, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, theirs)
        assert counts == counted


def test_augmentation_does_change_what_the_model_gets() -> None:
    first, second = _steps(task(batch=34), epoch=1), _steps(task(batch=34), epoch=1)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    made = arrays(103)
    raw = Normalizer(made, "channels_first", CPU.primary)
    batches = build_source(made, task(batch=34), (), CPU)
    batches.epoch = 1
    assert not any(
        torch.equal(raw(b.tensors[0]), s[0]) for b, s in zip(batches, first, strict=True)
    )


def test_the_source_is_the_plan_s() -> None:
    made = arrays(40)
    assert isinstance(build_source(made, task(input="loader"), (), CPU), LoaderSource)
    assert isinstance(build_source(made, task(input="resident"), (), CPU), ResidentSource)


def _losses(monkeypatch: pytest.MonkeyPatch, placement: dict[str, Any]) -> list[float]:
    """Losses of an epoch of cnn10 on 40 made images of 32 × 32, in this process."""
    made = arrays(40)
    shown = np.kron(made.train_images, np.ones((1, 4, 4, 3), dtype=np.uint8))
    coloured = {"train_images": shown, "mean": made.mean * 3, "std": made.std * 3}
    monkeypatch.setattr(data, "load", lambda _: type(made)(**{**vars(made), **coloured}))
    trainer = Trainer(task(workload="cnn10", batch=16, epochs=1, **placement), CPU)
    return [float(trainer.step(batch)) for batch in trainer.source]


def test_losses_of_an_epoch_are_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _losses(monkeypatch, PLACEMENTS[0])
    assert len(plain) == 3
    for placement in (PLACEMENTS[1], PLACEMENTS[3]):
        assert _losses(monkeypatch, placement) == plain


def _chosen(patch: pytest.MonkeyPatch, free: int, requested: Task, devices: Devices = CPU) -> str:
    """Which source is taken with so many bytes free; before anything is copied."""
    patch.setattr(device_dataset, "free_bytes", lambda _: free)
    for kind in ("ResidentSource", "ShardedSource"):
        patch.setattr(sources, kind, lambda *_, kind=kind: kind)
    return str(build_source(arrays(40), requested, (), devices))


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1.25), (2, 2.5), (3, 3.75)])
def test_ranks_on_a_host_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, ranks: int, parts: float
) -> None:
    """Free memory in parts of the data set: a copy a rank, else a shard each, else nothing."""
    requested, needed = (
        task(input="resident", world_size=ranks),
        device_dataset.dataset_bytes(arrays(40)),
    )
    assert _chosen(monkeypatch, round(parts * needed), requested) == "ResidentSource"
    if ranks > 1:
        assert _chosen(monkeypatch, round(parts * needed) - 1, requested) == "ShardedSource"
        assert _chosen(monkeypatch, round(1.25 * needed), requested) == "ShardedSource"
    with pytest.raises(OutOfMemory, match=rf"the host \({ranks} ranks\).*--input loader"):
        _chosen(monkeypatch, round(1.25 * needed) - 1, requested)


def test_the_host_has_at_most_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    requested, needed = (
        task(input="resident", world_size=2),
        device_dataset.dataset_bytes(arrays(40)),
    )
    small = dataclasses.replace(requested.machine, memory_bytes=2 * needed)
    assert _chosen(monkeypatch, 2**40, requested) == "ResidentSource"
    assert (
        _chosen(monkeypatch, 2**40, dataclasses.replace(requested, machine=small))
        == "ShardedSource"
    )


def test_each_gpu_holds_a_copy_or_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 samples of 72 bytes on three GPUs: the largest shard has 14."""
    requested, gpu = task(input="resident", world_size=3), Devices((torch.device("cuda", 2),))
    assert _chosen(monkeypatch, 50 * 72, requested, gpu) == "ResidentSource"
    assert _chosen(monkeypatch, 50 * 72 - 1, requested, gpu) == "ShardedSource"
    assert _chosen(monkeypatch, 1260, requested, gpu) == "ShardedSource"
    sizes = r"2.68e-06 GiB \(9.39e-07 GiB sharded\) on each of 3 GPUs"
    with pytest.raises(OutOfMemory, match=sizes):
        _chosen(monkeypatch, 1259, requested, gpu)
    with pytest.raises(OutOfMemory, match="on cuda:2;"):
        _chosen(monkeypatch, 1260, task(input="resident"), gpu)


def test_a_gpu_has_at_most_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    requested, gpu = task(input="resident", world_size=2), Devices((torch.device("cuda", 1),))
    fields = tuple(
        GpuInfo(index=i, name="GPU", memory_bytes=bytes_) for i, bytes_ in ((0, 1), (1, 3000))
    )
    small = dataclasses.replace(requested.machine, gpus=fields)
    assert (
        _chosen(monkeypatch, 2**40, dataclasses.replace(requested, machine=small), gpu)
        == "ShardedSource"
    )
