"""The input of a plan: where a rank's batches come from, and what the device still does to them.

Both are chosen once; the step knows neither the placement of the data nor that of augmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from nfold.data.arrays import Arrays
from nfold.frameworks.base import Task
from nfold.frameworks.torch.augment import augmentation
from nfold.frameworks.torch.batch import Batch, Samples, Tensors
from nfold.frameworks.torch.devices import Devices, free_bytes
from nfold.frameworks.torch.images import Normalize
from nfold.frameworks.torch.input import Loaded, Stream
from nfold.frameworks.torch.resident import Resident, check_fits, data_bytes

Operations = tuple[tuple[str, int], ...]
Prepare = Callable[[Samples, Tensor], Tensor]
"""Samples on the device and their epoch, int64 [], to the model's input."""


class Source(Protocol):
    """A rank's batches on its device: set ``epoch``, then iterate over it."""

    epoch: int

    @property
    def largest(self) -> int:
        """Samples of this rank's largest batch."""

    def __len__(self) -> int:
        """Batches of one iteration."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches of ``epoch``, or of a run in steps all of them."""

    def unpack(self, tensors: Tensors) -> Samples:
        """The samples that a batch's tensors are, or stand for; may be captured in a graph."""


def source(arrays: Arrays, task: Task, operations: Operations, devices: Devices) -> Source:
    """The batches of the plan; raises OutOfMemory where resident data would not fit."""
    stream = Stream(len(arrays.train_labels), task, limit=_limit(task))
    if task.plan.input == "resident":
        _check_fits(arrays, task, devices)
        return Resident(arrays, stream, devices.primary)
    on_cpu = augmentation(operations, arrays, task.plan.seed, torch.device("cpu"))
    in_worker = on_cpu if task.plan.augment == "cpu" else None
    return Loaded(arrays, task, stream, in_worker, devices.primary)


def preparation(
    arrays: Arrays, task: Task, operations: Operations, normalize: Normalize, devices: Devices
) -> Prepare:
    """Augments on the device, where the plan places it there, then normalises."""
    left = operations if task.plan.augment == "device" else ()
    augment = augmentation(left, arrays, task.plan.seed, devices.primary)

    def prepare(samples: Samples, epoch: Tensor) -> Tensor:
        return normalize(augment(samples.images, samples.ids, epoch))

    return prepare


def _check_fits(arrays: Arrays, task: Task, devices: Devices) -> None:
    """CPU devices share the host's memory, and every rank keeps a copy of its own there."""
    if devices.cuda:
        check_fits(data_bytes(arrays), free_bytes(devices.primary), str(devices.primary))
        return
    free = min(free_bytes(devices.primary), task.machine.memory_bytes)
    check_fits(task.world_size * data_bytes(arrays), free, f"the host ({task.world_size} ranks)")


def _limit(task: Task) -> int | None:
    """Steps of a run that is measured in steps, warm-up included; None where epochs decide."""
    if task.plan.steps is None:
        return None
    return task.plan.steps + (task.plan.warmup_steps or 0)
