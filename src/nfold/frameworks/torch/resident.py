"""Resident input: the training set on the device, copied once; a step only selects from it.

Nothing is loaded while training: the order of an epoch is one tensor, copied to the device at
the epoch's start, of which every step takes the next part.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from nfold.data.arrays import DataSetArrays
from nfold.errors import OutOfMemory
from nfold.frameworks.base import Task
from nfold.frameworks.stream import SampleIds
from nfold.frameworks.torch.batch import SampleTensors, Tensors
from nfold.frameworks.torch.devices import Devices, free_bytes
from nfold.frameworks.torch.input import BatchKeySampler
from nfold.frameworks.torch.parallel import all_reduce_min
from nfold.frameworks.torch.placed import DeviceSource, upload

MAX_FREE_FRACTION = 0.8
"""The part of a device's free memory that a data set may take; the rest is for the training."""


def fits(needed_bytes: int, free_bytes: int) -> bool:
    """Whether a data set takes at most MOST_OF_FREE of what is free."""
    return needed_bytes <= MAX_FREE_FRACTION * free_bytes


def check_fits(
    needed_bytes: int,
    free_bytes: int,
    device_name: str,
    *,
    sharded_bytes: int | None = None,
    advice: str = "--input loader",
) -> None:
    """Raise OutOfMemory where a data set fits neither whole nor, if it can be, sharded.

    ``instead`` is what a reader is told to do.
    """
    if fits(needed_bytes if sharded_bytes is None else sharded_bytes, free_bytes):
        return
    sharded = "" if sharded_bytes is None else f", sharded {_gib(sharded_bytes)},"
    raise OutOfMemory(
        f"input 'resident' needs {_gib(needed_bytes)}{sharded} on {device_name}, of whose free "
        f"{_gib(free_bytes)} it may take {MAX_FREE_FRACTION:.0%}; next: {advice}"
    )


def fits_unsharded(
    needed_bytes: int,
    samples: int,
    free_bytes: int,
    *,
    ranks: int,
    device: torch.device,
    advice: str = "--input loader",
) -> bool:
    """Whether every device holds the whole data set, else its shard; OutOfMemory for neither.

    All ranks choose by the least that any has free, and must ask together. CPU devices share
    the host's memory: it takes every rank's copy, or all shards.
    """
    least = all_reduce_min(free_bytes, ranks, device)
    if device.type == "cuda":
        whole, shard = needed_bytes, -(-samples // ranks) * (needed_bytes // max(1, samples))
        where = str(device) if ranks == 1 else f"each of {ranks} GPUs"
    else:
        whole, shard = ranks * needed_bytes, needed_bytes
        where = f"the host ({ranks} ranks)"
    if fits(whole, least):
        return True
    sharded = shard if ranks > 1 else None
    check_fits(whole, least, where, sharded_bytes=sharded, advice=advice)
    return False


def available_bytes(task: Task, devices: Devices) -> int:
    """What is free for this rank's device, at most what the machine was said to have."""
    found = free_bytes(devices.primary)
    if not devices.is_cuda:
        return min(found, task.machine.memory_bytes)
    said = {gpu.index: gpu.memory_bytes for gpu in task.machine.gpus}
    return min(found, said.get(devices.primary.index) or found)


def dataset_bytes(arrays: DataSetArrays) -> int:
    """Bytes of the training images and labels."""
    return arrays.train_images.nbytes + arrays.train_labels.nbytes


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"


class ResidentSource(DeviceSource[SampleIds]):
    """The whole data set on this rank's device; a batch is the ids of its samples."""

    def __init__(
        self, arrays: DataSetArrays, sampler: BatchKeySampler, device: torch.device
    ) -> None:
        super().__init__(arrays.train_images, arrays.train_labels, sampler, device)

    def build_route(self, order: SampleIds) -> SampleIds:
        """This rank's samples of an epoch, step after step."""
        return order[self._positions]

    def batch_tensors(self, route: SampleIds) -> Iterator[Tensors]:
        """The ids [n] of every batch: parts of one tensor."""
        ids = upload(route, self._device)
        for start, stop in pairwise(self._offsets):
            yield (ids[start:stop],)

    def unpack(self, tensors: Tensors) -> SampleTensors:
        """The samples whose ids [n] the tensors are, selected on the device; nothing waits."""
        (ids,) = tensors
        return SampleTensors(
            self._images.index_select(0, ids), self._labels.index_select(0, ids), ids
        )
