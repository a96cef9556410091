"""The input of a plan: where a rank's batches come from, and what the device still does to them.

Both are chosen once; the step knows neither the placement of the data nor that of augmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from itertools import cycle, islice
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from nfold.data.arrays import DataSetArrays
from nfold.data.photographs import PhotographSet
from nfold.engines.base import Task
from nfold.engines.interleaver import task_length
from nfold.engines.sampling import step_limit
from nfold.engines.torch.batch import Batch, CanvasTensors, InputSamples, Tensors
from nfold.engines.torch.communication import data_parallel
from nfold.engines.torch.devices import Devices
from nfold.engines.torch.input.dataloader import (
    ArrayBatches,
    BatchKeySampler,
    LoaderSource,
    ToDevice,
    copy_batch,
    prefetch_batches,
)
from nfold.engines.torch.input.device_dataset import (
    ResidentSource,
    ShardedSource,
    available_bytes,
    dataset_bytes,
    fits_unsharded,
)
from nfold.engines.torch.input.distortion import DeviceDistortion
from nfold.engines.torch.input.image_files import (
    CanvasTransfer,
    ImageBatches,
    JpegBatches,
    NvjpegTransfer,
    ResidentImageSource,
    torchvision_decoder,
)
from nfold.engines.torch.input.preprocessing import Normalize, build_augmentation
from nfold.engines.torch.input.rate_cache import rate_notes

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
    samples, device = len(arrays.train_labels), devices.primary
    left = available_bytes(task, devices)
    if fits_unsharded(dataset_bytes(arrays), samples, left, ranks=task.world_size, device=device):
        return ResidentSource(arrays, stream, device)
    return ShardedSource(arrays, stream, task, device)


# What experiments put in place of parts of a training. Where nothing is left out, no-ops.
#
# Which one is taken is decided once, before the first step; no step asks.

MAX_WHOLE_EPOCH, REPLAYED_BATCHES = 64, 16
"""Batches that are replayed: all of an epoch of up to so many, else the first ones."""


def replay_source(source: BatchSource, task: Task, devices: Devices) -> BatchSource:
    """The source, or its first batches again and again, from the host or from the device."""
    kind = task.variant.input
    return build_replays(source, {kind}, devices).get(kind, source)


def build_replays(source: BatchSource, kinds: Set[str], devices: Devices) -> dict[str, BatchSource]:
    """For each of these kinds of input but the real one, what gives the same first batches again.

    None for data that are on the device already.
    """
    wanted = sorted(kinds - {"real"})
    if not wanted or not isinstance(source, LoaderSource):
        return {}
    steps = source.steps_per_epoch
    first = list(
        islice(source.host_batches(), steps if steps <= MAX_WHOLE_EPOCH else REPLAYED_BATCHES)
    )
    return {
        kind: ReplayedSource(source, first, devices.primary, resident=kind == "resident")
        for kind in wanted
    }


class ReplayedSource:
    """A loader's ``first`` batches, over and over, as many as it would have given."""

    def __init__(
        self,
        source: LoaderSource,
        batches: Sequence[Batch],
        device: torch.device,
        *,
        resident: bool,
    ) -> None:
        self._batches = (
            [source.to_device(batch, device) for batch in batches] if resident else batches
        )
        self._device = None if resident else device
        self._source = source
        self.epoch = 0

    @property
    def data_bytes(self) -> int:
        """Of the batches, where they stay on the device."""
        held = self._batches if self._device is None else []
        return sum(tensor.nbytes for batch in held for tensor in batch.tensors)

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """None."""
        return ()

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Batch]:
        again = islice(cycle(self._batches), len(self))
        return iter(
            again
            if self._device is None
            else prefetch_batches(again, self._device, self._source.to_device)
        )

    def unpack(self, tensors: Tensors) -> InputSamples:
        """As the loader's."""
        return self._source.unpack(tensors)


def synchronize_start(task: Task) -> None:
    """Let ranks that do not wait for each other at least begin at the same time.

    Sets the threads that an experiment asks for, too.
    """
    left_out = task.variant
    if left_out.threads is not None:
        torch.set_num_threads(left_out.threads)
    if not left_out.ranks_synchronize:
        data_parallel.barrier(task.world_size)
