"""Batches of photographs: what a loader's worker does of decoding and distorting, by the plan.

With everything on the CPU a worker hands out finished images. With ``augment`` on the device it
decodes, and hands out the boxes' pixels, one after another, without any that nobody looks at. With
``decode`` on the device as well it hands out the JPEGs as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from nfold.data import photographs
from nfold.data.arrays import Images
from nfold.data.distortion import Distorter, Look
from nfold.data.part import Part
from nfold.data.photographs import Photographs
from nfold.data.whole import mapped
from nfold.frameworks.base import Task
from nfold.frameworks.stream import sample_hash
from nfold.frameworks.torch.batch import Batch, Tensors
from nfold.frameworks.torch.boxes import boxes, reduced, reductions
from nfold.frameworks.torch.distortion import looks
from nfold.frameworks.torch.input import Key
from nfold.plan import Plan

NO_IDS = torch.empty(0, dtype=torch.int64)


def photographs_of(plan: Plan, chosen: Mapping[str, int]) -> Photographs:
    """The photographs of a workload's parameters, as the parent has packed and checked them."""
    found = photographs.load().usable(classes=chosen["classes"], skip_bad=plan.bad_images == "skip")
    train = found.train.first(chosen["samples"])
    return dataclasses.replace(found, train=mapped(train) if plan.cache == "decoded" else train)


class Drawn:
    """The boxes of some samples of a data set and what they need of its files."""

    def __init__(self, part: Part, seed: int, size: int, key: Key) -> None:
        self.ids = torch.from_numpy(key.ids)
        self.files = key.ids % len(part)
        sizes = torch.from_numpy(part.sizes[self.files])
        full = boxes(seed, key.epoch, self.ids, sizes)
        self.reductions = reductions(full, size)
        self.boxes = reduced(full, self.reductions)


class Photos(Dataset[Batch]):
    """Whole batches by key, decoded and perhaps distorted, in a loader's worker."""

    def __init__(self, part: Part, task: Task, size: int) -> None:
        self._part = part
        self._seed = task.plan.seed
        self._size = size
        self._here = task.plan.augment == "cpu"
        self._distort: Distorter | None = None

    def __getitem__(self, key: Key) -> Batch:
        drawn = Drawn(self._part, self._seed, self._size, key)
        labels = torch.from_numpy(self._part.labels[drawn.files])
        tensors = self._finished(drawn, key, labels) if self._here else self._raw(drawn, labels)
        return batch_of(key, tensors)

    def _finished(self, drawn: Drawn, key: Key, labels: Tensor) -> Tensors:
        """Distorted images [n, size, size, 3], labels, and no ids: nothing is left to draw."""
        if self._distort is None:
            self._distort = Distorter(self._size)
        images = shared(len(drawn.ids), self._size, self._size, 3)
        into = images.numpy()
        for row, look in enumerate(each_look(self._seed, key.epoch, drawn.ids)):
            self._distort(self._region(drawn, row), look, into[row])
        return images, labels, NO_IDS

    def _raw(self, drawn: Drawn, labels: Tensor) -> Tensors:
        """The boxes' pixels after one another, labels, ids, and the boxes' heights and widths."""
        sides = drawn.boxes[:, 2:].contiguous()
        ends = np.cumsum(3 * sides.prod(dim=1).numpy())
        pixels = shared(int(ends[-1]))
        into = pixels.numpy()
        for row, end in enumerate(ends):
            region = self._region(drawn, row)
            into[end - region.size : end].reshape(region.shape)[:] = region
        return pixels, labels, drawn.ids, sides

    def _region(self, drawn: Drawn, row: int) -> Images:
        """The pixels [height, width, 3] of a sample's box."""
        file, by = int(drawn.files[row]), int(drawn.reductions[row])
        top, left, tall, wide = drawn.boxes[row].tolist()
        return self._part.decoded(file, by)[top : top + tall, left : left + wide]


def each_look(seed: int, epoch: int, ids: Tensor) -> list[Look]:
    """The looks of samples one by one."""
    found = looks(seed, epoch, ids)
    columns = [column.tolist() for column in vars(found).values()]
    return [Look(*row) for row in zip(*columns, strict=True)]


def batch_of(key: Key, tensors: Tensors) -> Batch:
    """The batch of a key."""
    return Batch(
        tensors=tensors,
        epoch=key.epoch,
        count=key.count,
        global_count=key.global_count,
        sample_hash=sample_hash(key.ids[: key.count]),
    )


def shared(*shape: int) -> Tensor:
    """An empty uint8 tensor; in a loader's worker in the memory that it is handed over in."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    count = int(np.prod(shape))
    storage = torch.UntypedStorage._new_shared(count)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
