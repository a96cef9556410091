"""The input of a plan: where a rank's batches come from, and what the device still does to them.

Both are chosen once; the step knows neither the placement of the data nor that of augmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from nfold.data.arrays import DataSetArrays
from nfold.data.photographs import PhotographSet
from nfold.frameworks.base import Task
from nfold.frameworks.rates import rate_notes
from nfold.frameworks.stream import step_limit
from nfold.frameworks.torch.augment import build_augmentation
from nfold.frameworks.torch.batch import Batch, CanvasTensors, InputSamples, Tensors
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.distortion import DeviceDistortion
from nfold.frameworks.torch.images import Normalize
from nfold.frameworks.torch.input import ArrayBatches, BatchKeySampler, LoaderSource
from nfold.frameworks.torch.landing import CanvasTransfer
from nfold.frameworks.torch.nvjpeg import JpegBatches, NvjpegTransfer, torchvision_decoder
from nfold.frameworks.torch.photographs import ImageBatches
from nfold.frameworks.torch.prefetch import ToDevice, copy_batch
from nfold.frameworks.torch.resident import (
    ResidentSource,
    available_bytes,
    dataset_bytes,
    fits_unsharded,
)
from nfold.frameworks.torch.sharded import ShardedSource
from nfold.frameworks.torch.whole import ResidentImageSource
from nfold.frameworks.turning import task_length

Operations = tuple[tuple[str, int], ...]
PrepareInput = Callable[[InputSamples, Tensor], Tensor]
"""Samples on the device and their epoch, int64 [], to the model's input."""


class BatchSource(Protocol):
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

    def unpack(self, tensors: Tensors) -> InputSamples:
        """The samples that a batch's tensors are, or stand for; may be captured in a graph."""


def build_source(
    arrays: DataSetArrays, task: Task, operations: Operations, devices: Devices
) -> BatchSource:
    """The batches of the plan; raises OutOfMemory where resident data would not fit."""
    stream = BatchKeySampler(len(arrays.train_labels), task, limit=_step_limit(task))
    if task.plan.input == "resident":
        return _build_resident_source(arrays, stream, task, devices)
    on_cpu = build_augmentation(operations, arrays, task.plan.seed, torch.device("cpu"))
    in_worker = on_cpu if task.plan.augment == "cpu" else None
    return LoaderSource(ArrayBatches(arrays, in_worker), task, stream, devices.primary)


def build_image_source(
    photographs: PhotographSet, arrays: DataSetArrays, task: Task, devices: Devices
) -> BatchSource:
    """The batches of photographs, decoded and distorted where the plan says."""
    stream = BatchKeySampler(len(arrays.train_labels), task, limit=_step_limit(task))
    size = arrays.train_images.shape[1]
    if task.plan.input == "resident":
        return ResidentImageSource(photographs, stream, size, task, devices)
    batches: Dataset[Batch]
    land: ToDevice
    if task.plan.decode == "device":
        batches, land = (
            JpegBatches(photographs.train, task, size),
            NvjpegTransfer(size, torchvision_decoder()),
        )
    else:
        batches = ImageBatches(photographs.train, task, size)
        land = CanvasTransfer(size) if task.plan.augment == "device" else copy_batch
    notes = (*photographs.notes, *rate_notes(task))
    return LoaderSource(batches, task, stream, devices.primary, land, notes)


def _step_limit(task: Task) -> int | None:
    """Steps of a run that is measured in steps; with turns, of all of them."""
    return task_length(task).total if task.interleaved_variants else step_limit(task.plan)


def build_image_preparation(
    arrays: DataSetArrays, task: Task, normalize: Normalize, devices: Devices
) -> PrepareInput:
    """Distorts on the device, where the plan places it there, then normalises."""
    if task.plan.augment == "cpu":
        return lambda samples, _: normalize(samples.images)
    distort = DeviceDistortion(arrays.train_images.shape[1], task.plan.seed, devices.primary)

    def prepare(samples: InputSamples, epoch: Tensor) -> Tensor:
        assert isinstance(samples, CanvasTensors)
        return normalize(distort(samples, epoch))

    return prepare


def build_preparation(
    arrays: DataSetArrays,
    task: Task,
    operations: Operations,
    normalize: Normalize,
    devices: Devices,
) -> PrepareInput:
    """Augments on the device, where the plan places it there, then normalises."""
    left = operations if task.plan.augment == "device" else ()
    augment = build_augmentation(left, arrays, task.plan.seed, devices.primary)

    def prepare(samples: InputSamples, epoch: Tensor) -> Tensor:
        return normalize(augment(samples.images, samples.ids, epoch))

    return prepare


def _build_resident_source(
    arrays: DataSetArrays, stream: BatchKeySampler, task: Task, devices: Devices
) -> BatchSource:
    """Whole on every device, or else sharded."""
    samples, device = len(arrays.train_labels), devices.primary
    left = available_bytes(task, devices)
    if fits_unsharded(dataset_bytes(arrays), samples, left, ranks=task.world_size, device=device):
        return ResidentSource(arrays, stream, device)
    return ShardedSource(arrays, stream, task, device)
