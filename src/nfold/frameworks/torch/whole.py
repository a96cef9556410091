"""Resident photographs: decoded once, whole, on every device; a step's boxes are cut out there.

The host draws the boxes of each batch, a few kilobytes. Boxes that are decoded at a reduced scale
elsewhere are means of pixels here, as nvJPEG's are (docs/decisions/input-pipeline.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from torch.utils.data import Dataset

from nfold.data.arrays import Images
from nfold.data.part import PackedJpegs
from nfold.data.photographs import PhotographSet
from nfold.frameworks.base import Task
from nfold.frameworks.boxes import canvas_side
from nfold.frameworks.photographs import SampleBoxes
from nfold.frameworks.torch.batch import Batch, CanvasTensors, Tensors
from nfold.frameworks.torch.cutting import PackedImages, crop_to_canvases
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.input import BatchKey, BatchKeySampler, LoaderSource
from nfold.frameworks.torch.parallel import all_reduce_min
from nfold.frameworks.torch.photographs import build_batch
from nfold.frameworks.torch.placed import copy_in_chunks
from nfold.frameworks.torch.resident import available_bytes, check_fits


class BoxBatches(Dataset[Batch]):
    """Which part of which photograph every sample of a batch is; no pixel is touched."""

    def __init__(self, part: PackedJpegs, task: Task, size: int) -> None:
        self._part, self._seed, self._size = part, task.plan.seed, size

    def __getitem__(self, key: BatchKey) -> Batch:
        drawn = SampleBoxes(self._part, self._seed, self._size, key.epoch, key.ids)
        boxes = torch.from_numpy(
            np.column_stack([drawn.boxes, drawn.reductions, drawn.file_indices])
        )
        labels = torch.from_numpy(self._part.labels[drawn.file_indices])
        return build_batch(key, (boxes, labels, torch.from_numpy(key.ids)))


class ResidentCropTransfer:
    """Brings a batch to the device as ``Canvases`` does, its pixels cut out of what lies there."""

    def __init__(self, part: PackedJpegs, size: int, device: torch.device) -> None:
        self.pixels = copy_in_chunks(cast(Images, part.decoded_pixels), device)
        self._sizes = torch.from_numpy(np.array(part.sizes))
        self._starts = torch.from_numpy(part.pixel_offsets[:-1])
        self._side = canvas_side(size)

    def __call__(self, batch: Batch, device: torch.device) -> Batch:
        """Tensors (images, labels, ids, places) of a batch (boxes, labels, ids)."""
        boxes, labels, ids = batch.tensors
        files = boxes[:, 5]
        images = PackedImages(
            pixels=self.pixels, sizes=self._sizes[files], starts=self._starts[files], planar=False
        )
        laid = crop_to_canvases(images, boxes[:, :5], self._side)
        labels, ids, places = (
            tensor.to(device, non_blocking=True) for tensor in (labels, ids, boxes[:, 2:4])
        )
        return dataclasses.replace(batch, tensors=(laid, labels, ids, places))


class ResidentImageSource:
    """The batches of photographs that lie decoded on this rank's device.

    Raises OutOfMemory, with the sizes, where any rank's device has not the memory.
    """

    def __init__(
        self,
        photographs: PhotographSet,
        sampler: BatchKeySampler,
        size: int,
        task: Task,
        devices: Devices,
    ) -> None:
        part = photographs.train
        _check_memory(part, task, devices)
        cut = ResidentCropTransfer(part, size, devices.primary)
        notes = (*photographs.notes, *reduction_note(part, size))
        boxes = BoxBatches(part, task, size)
        self._source = LoaderSource(boxes, task, sampler, devices.primary, cut, notes)
        self.data_bytes = cut.pixels.nbytes
        self.epoch = 0

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """Of bad files, and of boxes that are means of pixels."""
        return self._source.notes

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Batch]:
        self._source.epoch = self.epoch
        return iter(self._source)

    def unpack(self, tensors: Tensors) -> CanvasTensors:
        """The samples, which the tensors are."""
        return CanvasTensors(*tensors)


def reduction_note(part: PackedJpegs, size: int) -> tuple[tuple[str, str], ...]:
    """What is not the same work as a loader's, as (kind, text); nothing where no box is reduced."""
    shortest, longest = part.sizes.min(axis=1), part.sizes.max(axis=1)
    large = int(((shortest >= 2 * size) | (longest > canvas_side(size))).sum())
    if not large:
        return ()
    text = (
        f"{large} of {len(part)} resident photographs are so large that boxes of them are reduced: "
        "by means of pixels, where a loader's decoder leaves out detail"
    )
    return (("resident_means", text),)


def _check_memory(part: PackedJpegs, task: Task, devices: Devices) -> None:
    """OutOfMemory on every rank where one has too little free; CPU devices share the host's."""
    needed, ranks = int(part.pixel_offsets[-1]), task.world_size
    where = str(devices.primary) if ranks == 1 else f"each of {ranks} GPUs"
    if not devices.is_cuda:
        needed, where = ranks * needed, f"the host ({ranks} ranks)"
    check_fits(
        needed, all_reduce_min(available_bytes(task, devices), ranks, devices.primary), where
    )
