"""The input of a plan: where a rank's batches come from, and what the device still does to them.

Both are chosen once; the step knows neither the placement of the data nor that of augmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from nfold.data.arrays import Arrays
from nfold.data.photographs import Photographs
from nfold.frameworks.base import Task
from nfold.frameworks.rates import rate_notes
from nfold.frameworks.stream import step_limit
from nfold.frameworks.torch.augment import augmentation
from nfold.frameworks.torch.batch import Batch, Boxed, Given, Tensors
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.distortion import Distortion
from nfold.frameworks.torch.images import Normalize
from nfold.frameworks.torch.input import Batches, Loaded, Stream
from nfold.frameworks.torch.landing import Canvases
from nfold.frameworks.torch.nvjpeg import Decoded, Files, torchvision_decode
from nfold.frameworks.torch.photographs import Photos
from nfold.frameworks.torch.prefetch import Land, copied
from nfold.frameworks.torch.resident import Resident, data_bytes, fits_whole, free
from nfold.frameworks.torch.sharded import Sharded
from nfold.frameworks.torch.whole import ResidentPhotographs
from nfold.frameworks.turning import length_of

Operations = tuple[tuple[str, int], ...]
Prepare = Callable[[Given, Tensor], Tensor]
"""Samples on the device and their epoch, int64 [], to the model's input."""


class Source(Protocol):
    """A rank's batches on its device: set ``epoch``, then iterate over it."""

    epoch: int

    @property
    def data_bytes(self) -> int:
        """Bytes of the training set that stay on this rank's device."""

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """What a reader of the measurement has to know about it, as (kind, text)."""

    def __len__(self) -> int:
        """Batches of one iteration."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches of ``epoch``, or of a run in steps all of them."""

    def unpack(self, tensors: Tensors) -> Given:
        """The samples that a batch's tensors are, or stand for; may be captured in a graph."""


def source(arrays: Arrays, task: Task, operations: Operations, devices: Devices) -> Source:
    """The batches of the plan; raises OutOfMemory where resident data would not fit."""
    stream = Stream(len(arrays.train_labels), task, limit=_limit(task))
    if task.plan.input == "resident":
        return _resident(arrays, stream, task, devices)
    on_cpu = augmentation(operations, arrays, task.plan.seed, torch.device("cpu"))
    in_worker = on_cpu if task.plan.augment == "cpu" else None
    return Loaded(Batches(arrays, in_worker), task, stream, devices.primary)


def photo_source(photographs: Photographs, arrays: Arrays, task: Task, devices: Devices) -> Source:
    """The batches of photographs, decoded and distorted where the plan says."""
    stream = Stream(len(arrays.train_labels), task, limit=_limit(task))
    size = arrays.train_images.shape[1]
    if task.plan.input == "resident":
        return ResidentPhotographs(photographs, stream, size, task, devices)
    batches: Dataset[Batch]
    land: Land
    if task.plan.decode == "device":
        batches, land = Files(photographs.train, task, size), Decoded(size, torchvision_decode())
    else:
        batches = Photos(photographs.train, task, size)
        land = Canvases(size) if task.plan.augment == "device" else copied
    notes = (*photographs.notes, *rate_notes(task))
    return Loaded(batches, task, stream, devices.primary, land, notes)


def _limit(task: Task) -> int | None:
    """Steps of a run that is measured in steps; with turns, of all of them."""
    return length_of(task).total if task.turns else step_limit(task.plan)


def photo_preparation(
    arrays: Arrays, task: Task, normalize: Normalize, devices: Devices
) -> Prepare:
    """Distorts on the device, where the plan places it there, then normalises."""
    if task.plan.augment == "cpu":
        return lambda samples, _: normalize(samples.images)
    distort = Distortion(arrays.train_images.shape[1], task.plan.seed, devices.primary)

    def prepare(samples: Given, epoch: Tensor) -> Tensor:
        assert isinstance(samples, Boxed)
        return normalize(distort(samples, epoch))

    return prepare


def preparation(
    arrays: Arrays, task: Task, operations: Operations, normalize: Normalize, devices: Devices
) -> Prepare:
    """Augments on the device, where the plan places it there, then normalises."""
    left = operations if task.plan.augment == "device" else ()
    augment = augmentation(left, arrays, task.plan.seed, devices.primary)

    def prepare(samples: Given, epoch: Tensor) -> Tensor:
        return normalize(augment(samples.images, samples.ids, epoch))

    return prepare


def _resident(arrays: Arrays, stream: Stream, task: Task, devices: Devices) -> Source:
    """Whole on every device, or else sharded."""
    samples, device = len(arrays.train_labels), devices.primary
    left = free(task, devices)
    if fits_whole(data_bytes(arrays), samples, left, ranks=task.world_size, device=device):
        return Resident(arrays, stream, device)
    return Sharded(arrays, stream, task, device)
