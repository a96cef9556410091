"""Resident input: the training set on the device, copied once; a step only selects from it.

Nothing is loaded while training: the order of an epoch is one tensor, copied to the device at
the epoch's start, of which every step takes the next part.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from nfold.data.arrays import Arrays
from nfold.errors import OutOfMemory
from nfold.frameworks.base import Task
from nfold.frameworks.stream import Ids
from nfold.frameworks.torch.batch import Samples, Tensors
from nfold.frameworks.torch.devices import Devices, free_bytes
from nfold.frameworks.torch.input import Stream
from nfold.frameworks.torch.parallel import smallest
from nfold.frameworks.torch.placed import Placed, uploaded

MOST_OF_FREE = 0.8
"""The part of a device's free memory that a data set may take; the rest is for the training."""


def fits(needed_bytes: int, free_bytes: int) -> bool:
    """Whether a data set takes at most MOST_OF_FREE of what is free."""
    return needed_bytes <= MOST_OF_FREE * free_bytes


def check_fits(
    needed_bytes: int,
    free_bytes: int,
    where: str,
    *,
    sharded_bytes: int | None = None,
    instead: str = "--input loader",
) -> None:
    """Raise OutOfMemory where a data set fits neither whole nor, if it can be, sharded.

    ``instead`` is what a reader is told to do.
    """
    if fits(needed_bytes if sharded_bytes is None else sharded_bytes, free_bytes):
        return
    sharded = "" if sharded_bytes is None else f", sharded {_gib(sharded_bytes)},"
    raise OutOfMemory(
        f"input 'resident' needs {_gib(needed_bytes)}{sharded} on {where}, of whose free "
        f"{_gib(free_bytes)} it may take {MOST_OF_FREE:.0%}; next: {instead}"
    )


def fits_whole(
    needed_bytes: int,
    samples: int,
    free_bytes: int,
    *,
    ranks: int,
    device: torch.device,
    instead: str = "--input loader",
) -> bool:
    """Whether every device holds the whole data set, else its shard; OutOfMemory for neither.

    All ranks choose by the least that any has free, and must ask together. CPU devices share
    the host's memory: it takes every rank's copy, or all shards.
    """
    least = smallest(free_bytes, ranks, device)
    if device.type == "cuda":
        whole, shard = needed_bytes, -(-samples // ranks) * (needed_bytes // max(1, samples))
        where = str(device) if ranks == 1 else f"each of {ranks} GPUs"
    else:
        whole, shard = ranks * needed_bytes, needed_bytes
        where = f"the host ({ranks} ranks)"
    if fits(whole, least):
        return True
    sharded = shard if ranks > 1 else None
    check_fits(whole, least, where, sharded_bytes=sharded, instead=instead)
    return False


def free(task: Task, devices: Devices) -> int:
    """What is free for this rank's device, at most what the machine was said to have."""
    found = free_bytes(devices.primary)
    if not devices.cuda:
        return min(found, task.machine.memory_bytes)
    said = {gpu.index: gpu.memory_bytes for gpu in task.machine.gpus}
    return min(found, said.get(devices.primary.index) or found)


def data_bytes(arrays: Arrays) -> int:
    """Bytes of the training images and labels."""
    return arrays.train_images.nbytes + arrays.train_labels.nbytes


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"


class Resident(Placed[Ids]):
    """The whole data set on this rank's device; a batch is the ids of its samples."""

    def __init__(self, arrays: Arrays, stream: Stream, device: torch.device) -> None:
        super().__init__(arrays.train_images, arrays.train_labels, stream, device)

    def route(self, order: Ids) -> Ids:
        """This rank's samples of an epoch, step after step."""
        return order[self._positions]

    def tensors(self, route: Ids) -> Iterator[Tensors]:
        """The ids [n] of every batch: parts of one tensor."""
        ids = uploaded(route, self._device)
        for start, stop in pairwise(self._offsets):
            yield (ids[start:stop],)

    def unpack(self, tensors: Tensors) -> Samples:
        """The samples whose ids [n] the tensors are, selected on the device; nothing waits."""
        (ids,) = tensors
        return Samples(self._images.index_select(0, ids), self._labels.index_select(0, ids), ids)
