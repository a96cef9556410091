"""Batches of photographs: what a loader's worker does of decoding and distorting, by the plan.

With everything on the CPU a worker hands out finished images. With ``augment`` on the device it
decodes, and hands out the boxes' pixels, one after another, without any that nobody looks at. With
``decode`` on the device as well it hands out the JPEGs as they are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from nfold.data.distortion import Distorter
from nfold.data.part import PackedJpegs
from nfold.frameworks.base import Task
from nfold.frameworks.photographs import SampleBoxes, draw_distortions
from nfold.frameworks.stream import sample_hash
from nfold.frameworks.torch.batch import Batch, Tensors
from nfold.frameworks.torch.input import BatchKey

NO_IDS = torch.empty(0, dtype=torch.int64)


class ImageBatches(Dataset[Batch]):
    """Whole batches by key, decoded and perhaps distorted, in a loader's worker."""

    def __init__(self, part: PackedJpegs, task: Task, size: int) -> None:
        self._part = part
        self._seed = task.plan.seed
        self._size = size
        self._distorts_in_worker = task.plan.augment == "cpu"
        self._distort: Distorter | None = None

    def __getitem__(self, key: BatchKey) -> Batch:
        drawn = SampleBoxes(self._part, self._seed, self._size, key.epoch, key.ids)
        labels = torch.from_numpy(self._part.labels[drawn.file_indices])
        tensors = (
            self._distorted_tensors(drawn, key, labels)
            if self._distorts_in_worker
            else self._box_tensors(drawn, key, labels)
        )
        return build_batch(key, tensors)

    def _distorted_tensors(self, drawn: SampleBoxes, key: BatchKey, labels: Tensor) -> Tensors:
        """Distorted images [n, size, size, 3], labels, and no ids: nothing is left to draw."""
        if self._distort is None:
            self._distort = Distorter(self._size)
        images = shared_tensor(len(drawn), self._size, self._size, 3)
        into = images.numpy()
        for row, look in enumerate(draw_distortions(self._seed, key.epoch, key.ids)):
            self._distort(drawn.decode_region(row), look, into[row])
        return images, labels, NO_IDS

    def _box_tensors(self, drawn: SampleBoxes, key: BatchKey, labels: Tensor) -> Tensors:
        """The boxes' pixels after one another, labels, ids, and the boxes' heights and widths."""
        sides = np.ascontiguousarray(drawn.boxes[:, 2:])
        ends = np.cumsum(3 * sides.prod(axis=1))
        pixels = shared_tensor(int(ends[-1]))
        into = pixels.numpy()
        for row, end in enumerate(ends):
            region = drawn.decode_region(row)
            into[end - region.size : end].reshape(region.shape)[:] = region
        return pixels, labels, torch.from_numpy(key.ids), torch.from_numpy(sides)


def build_batch(key: BatchKey, tensors: Tensors) -> Batch:
    """The batch of a key."""
    return Batch(
        tensors=tensors,
        epoch=key.epoch,
        count=key.count,
        global_count=key.global_count,
        sample_hash=sample_hash(key.ids[: key.count]),
    )


def shared_tensor(*shape: int) -> Tensor:
    """An empty uint8 tensor; in a loader's worker in the memory that it is handed over in."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    count = int(np.prod(shape))
    storage = torch.UntypedStorage._new_shared(count)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
