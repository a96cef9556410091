"""The input of a plan: where a rank's batches come from, and what the device does to them.

Both are chosen once. A step does not depend on where the data and the augmentation are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from itertools import cycle, islice

import torch
from torch import Tensor
from torch.utils.data import Dataset

from nfold.data.arrays import DataSetArrays
from nfold.data.photographs import PhotographSet
from nfold.engines.base import Task
from nfold.engines.interleaver import task_length
from nfold.engines.sampling import step_limit
from nfold.engines.torch.batch import Batch, CanvasTensors, InputSamples, Tensors
from nfold.engines.torch.devices import Devices
from nfold.engines.torch.input.dataloader import (
    ArrayBatches,
    BatchKeySampler,
    BatchSource,
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
from nfold.engines.torch.input.image_files import (
    CanvasTransfer,
    ImageBatches,
    JpegBatches,
    NvjpegTransfer,
    ResidentImageSource,
    torchvision_decoder,
)
from nfold.engines.torch.input.preprocessing import DeviceDistortion, Normalize, build_augmentation
from nfold.engines.torch.input.rate_cache import rate_notes

Operations = tuple[tuple[str, int], ...]
# samples on the device, epoch int64 [] -> input of the model
PrepareInput = Callable[[InputSamples, Tensor], Tensor]


def build_source(
    arrays: DataSetArrays, task: Task, operations: Operations, devices: Devices
) -> BatchSource:
    """Return the batches of the plan. Raises OutOfMemory if resident data do not fit."""
    sampler = BatchKeySampler(len(arrays.train_labels), task, limit=_step_limit(task))
    if task.plan.input == "resident":
        left, samples = available_bytes(task, devices), len(arrays.train_labels)
        device, ranks = devices.primary, task.world_size
        if fits_unsharded(dataset_bytes(arrays), samples, left, ranks=ranks, device=device):
            return ResidentSource(arrays, sampler, device)
        return ShardedSource(arrays, sampler, task, device)
    on_cpu = build_augmentation(operations, arrays, task.plan.seed, torch.device("cpu"))
    in_worker = on_cpu if task.plan.augment == "cpu" else None
    return LoaderSource(ArrayBatches(arrays, in_worker), task, sampler, devices.primary)


def build_image_source(
    photographs: PhotographSet, arrays: DataSetArrays, task: Task, devices: Devices
) -> BatchSource:
    """Return the batches of photographs, decoded and distorted where the plan says."""
    sampler = BatchKeySampler(len(arrays.train_labels), task, limit=_step_limit(task))
    size = arrays.train_images.shape[1]
    if task.plan.input == "resident":
        return ResidentImageSource(photographs, sampler, size, task, devices)
    batches: Dataset[Batch]
    transfer: ToDevice
    if task.plan.decode == "device":
        batches = JpegBatches(photographs.train, task, size)
        transfer = NvjpegTransfer(size, torchvision_decoder())
    else:
        batches = ImageBatches(photographs.train, task, size)
        transfer = CanvasTransfer(size) if task.plan.augment == "device" else copy_batch
    notes = (*photographs.notes, *rate_notes(task))
    return LoaderSource(batches, task, sampler, devices.primary, transfer, notes)


def _step_limit(task: Task) -> int | None:
    return task_length(task).total if task.interleaved_variants else step_limit(task.plan)


def build_image_preparation(
    arrays: DataSetArrays, task: Task, normalize: Normalize, devices: Devices
) -> PrepareInput:
    """Return a function that distorts on the device, if the plan says so, and normalises."""
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
    """Return a function that augments on the device, if the plan says so, and normalises."""
    on_device = operations if task.plan.augment == "device" else ()
    augment = build_augmentation(on_device, arrays, task.plan.seed, devices.primary)
    return lambda samples, epoch: normalize(augment(samples.images, samples.ids, epoch))


# Replayed batches: a whole epoch of up to MAX_WHOLE_EPOCH, else the first REPLAYED_BATCHES.
MAX_WHOLE_EPOCH, REPLAYED_BATCHES = 64, 16


def replay_source(source: BatchSource, task: Task, devices: Devices) -> BatchSource:
    """Return the source, or one that replays its first batches, by the task's variant."""
    kind = task.variant.input
    return build_replays(source, {kind}, devices).get(kind, source)


def build_replays(source: BatchSource, kinds: Set[str], devices: Devices) -> dict[str, BatchSource]:
    """Return sources that replay the first batches, by the kinds of input other than ``real``.

    Empty for data that are on the device already.
    """
    replayed = sorted(kinds - {"real"})
    if not replayed or not isinstance(source, LoaderSource):
        return {}
    steps = source.steps_per_epoch
    count = steps if steps <= MAX_WHOLE_EPOCH else REPLAYED_BATCHES
    first = list(islice(source.host_batches(), count))
    return {
        kind: ReplayedSource(source, first, devices.primary, resident=kind == "resident")
        for kind in replayed
    }


class ReplayedSource(BatchSource):
    """Repeats the first batches of a loader, from the host or, ``resident``, from the device."""

    def __init__(
        self,
        source: LoaderSource,
        batches: Sequence[Batch],
        device: torch.device,
        *,
        resident: bool,
    ) -> None:
        if resident:
            batches = [source.to_device(batch, device) for batch in batches]
        self._batches = batches
        self._device = None if resident else device
        self._source = source
        self.epoch = 0
        if resident:
            self.data_bytes = sum(tensor.nbytes for batch in batches for tensor in batch.tensors)

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Batch]:
        batches = islice(cycle(self._batches), len(self))
        if self._device is None:
            return batches
        return iter(prefetch_batches(batches, self._device, self._source.to_device))

    def unpack(self, tensors: Tensors) -> InputSamples:
        return self._source.unpack(tensors)
