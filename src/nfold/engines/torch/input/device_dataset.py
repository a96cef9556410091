"""What inputs whose samples lie on devices have in common: the order of epochs, made ahead.

Samples, order, slices, weights and hashes are the stream's, the same as a loader's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from nfold.core.errors import OutOfMemory
from nfold.data.arrays import DataSetArrays
from nfold.engines.base import Task
from nfold.engines.sampling import RankSlice, SampleIds, hash_ids
from nfold.engines.torch.batch import Batch, SampleTensors, Tensors
from nfold.engines.torch.communication.data_parallel import all_reduce_min
from nfold.engines.torch.devices import Devices, free_bytes
from nfold.engines.torch.input.dataloader import BatchKeySampler

CHUNK_BYTES = 2**26
"""Copied at a time: a data set that is a memory map need not fit into the host's memory."""
Route = TypeVar("Route")
"""What the host works out for all steps of an epoch before it begins."""


class EpochPrefetcher(Generic[Route]):
    """What ``make`` gives for an epoch; that of the next one is made by a thread meanwhile."""

    def __init__(self, make: Callable[[int], Route]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="order")
        self._begun: dict[int, Future[Route]] = {}
        self._begin(0)

    def get(self, epoch: int) -> Route:
        """That of ``epoch``; the one after it is begun."""
        self._begin(epoch)
        wanted = self._begun.pop(epoch)
        self._begin(epoch + 1)
        return wanted.result()

    def _begin(self, epoch: int) -> None:
        if epoch not in self._begun:
            self._begun = {epoch: self._thread.submit(self._make, epoch)}


class DeviceSource(ABC, Generic[Route]):
    """Batches of samples on the device; iterate once an epoch, after setting ``epoch``.

    The next epoch's route is made by a thread while one is trained: 50,000 samples take 22 ms,
    a quarter of an epoch of cnn10 on four H200s.
    """

    def __init__(
        self,
        images: npt.NDArray[np.uint8],
        labels: SampleIds,
        sampler: BatchKeySampler,
        device: torch.device,
    ) -> None:
        self.epoch = 0
        self._sampler = sampler
        self._device = device
        self._images = copy_in_chunks(images, device)
        self._labels = copy_in_chunks(labels, device)
        self._positions = slice_positions(sampler.slices)
        self._offsets = np.cumsum([0, *(len(cut.positions) for cut in sampler.slices)])
        self._prefetcher = EpochPrefetcher(self._build_epoch)

    @abstractmethod
    def build_route(self, order: SampleIds) -> Route:
        """What the batches of an epoch need, from all ranks' samples in its order; in a thread."""

    @abstractmethod
    def batch_tensors(self, route: Route) -> Iterator[Tensors]:
        """The tensors of every batch of an epoch, for ``unpack``."""

    @abstractmethod
    def unpack(self, tensors: Tensors) -> SampleTensors:
        """The samples that a batch's tensors are, or stand for."""

    @property
    def data_bytes(self) -> int:
        """Bytes of the samples on this rank's device."""
        return self._images.nbytes + self._labels.nbytes

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """None."""
        return ()

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        self._sampler.epoch = self.epoch
        for epoch, cuts in self._sampler.epochs():
            yield from self._batches(epoch, cuts)

    def _batches(self, epoch: int, cuts: list[RankSlice]) -> Iterator[Batch]:
        route, hashes = self._prefetcher.get(epoch)
        now = torch.full((), epoch, dtype=torch.int64, device=self._device)
        for cut, tensors, hashed in zip(cuts, self.batch_tensors(route), hashes, strict=False):
            yield Batch(
                tensors=tensors,
                epoch=now,
                count=cut.count,
                global_count=cut.global_count,
                sample_hash=hashed,
            )

    def _build_epoch(self, epoch: int) -> tuple[Route, list[int]]:
        order = self._sampler.epoch_order(epoch)
        return self.build_route(order), self._hashes(order[self._positions])

    def _hashes(self, own: SampleIds) -> list[int]:
        counted = np.array([cut.count > 0 for cut in self._sampler.slices], dtype=np.uint64)
        sums: list[int] = (np.add.reduceat(hash_ids(own), self._offsets[:-1]) * counted).tolist()
        return sums


def slice_positions(slices: Sequence[RankSlice]) -> SampleIds:
    """Where a rank's samples lie in the order of an epoch, step after step."""
    return np.concatenate([cut.positions for cut in slices])


def copy_in_chunks(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of an array on the device, copied in parts."""
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    target = torch.empty(array.shape, dtype=kind, device=device)
    rows = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        part = np.array(array[start : start + rows])
        target[start : start + rows].copy_(torch.from_numpy(part))
    return target


def upload(numbers: SampleIds, device: torch.device) -> Tensor:
    """On a GPU copied from page-locked memory, so that the host does not wait for the step."""
    on_host = torch.from_numpy(numbers)
    if device.type == "cuda":
        return on_host.pin_memory().to(device, non_blocking=True)
    return on_host


# Resident input: the training set on the device, copied once; a step only selects from it.
#
# Nothing is loaded while training: the order of an epoch is one tensor, copied to the device at
# the epoch's start, of which every step takes the next part.

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
        return order[self._positions]

    def batch_tensors(self, route: SampleIds) -> Iterator[Tensors]:
        ids = upload(route, self._device)
        for start, stop in pairwise(self._offsets):
            yield (ids[start:stop],)

    def unpack(self, tensors: Tensors) -> SampleTensors:
        (ids,) = tensors
        return SampleTensors(
            self._images.index_select(0, ids), self._labels.index_select(0, ids), ids
        )


# Resident input over several devices: each holds a part of the data set, steps exchange samples.
#
# Every rank knows the order of an epoch, and so, before it begins, which samples each rank needs
# of which other in each step. Nothing is asked for and nothing waits for the device: a step's
# exchange is one all-to-all of images and one of labels, in order with the step's own collectives.

Counts = list[list[int]]
"""Samples per step and rank."""


class SliceProvider(Protocol):
    """Anything that says where each rank's samples lie in the order of an epoch."""

    def slices_of(self, rank: int) -> list[RankSlice]:
        """A rank's part of every step."""


@dataclass(frozen=True)
class ShardRoutes:
    """What one rank sends, receives and how it sorts what came, for all steps of an epoch.

    Step after step: ``sends`` are places in the rank's shard, ordered by the rank that gets them;
    ``places`` say where in what came each sample of the batch is, and ``ids`` which it is.
    """

    sends: SampleIds
    send_counts: Counts
    order: SampleIds
    receive_counts: Counts
    ids: SampleIds


class ShardRouter:
    """Who has which sample, and who needs it when. Rank r has the r-th of equal parts."""

    def __init__(self, samples: int, slice_provider: SliceProvider, rank: int, ranks: int) -> None:
        starts = [place * samples // ranks for place in range(ranks + 1)]
        self.own_range = range(starts[rank], starts[rank + 1])
        self._starts = np.array(starts[:-1])
        self._rank = rank
        cuts = [slice_provider.slices_of(one) for one in range(ranks)]
        self._positions = [slice_positions(each) for each in cuts]
        self._steps = [_steps([len(cut.positions) for cut in each]) for each in cuts]
        self._shape = len(cuts[rank]), ranks

    def routes(self, order: SampleIds) -> ShardRoutes:
        """The routes of an epoch, from all ranks' samples in its order."""
        sends, send_counts = self._sends(order)
        ids = order[self._positions[self._rank]]
        arrival, receive_counts = self._grouped(self._steps[self._rank], self._owners(ids))
        places = np.empty_like(arrival)
        places[arrival] = np.arange(len(arrival)) - _starts(receive_counts)
        return ShardRoutes(sends, send_counts.tolist(), places, receive_counts.tolist(), ids)

    def _sends(self, order: SampleIds) -> tuple[SampleIds, SampleIds]:
        ids = np.concatenate([order[needed] for needed in self._positions])
        steps = np.concatenate(self._steps)
        getters = np.repeat(
            np.arange(len(self._positions)), [len(each) for each in self._positions]
        )
        mine = self._owners(ids) == self._rank
        grouped, counts = self._grouped(steps[mine], getters[mine])
        return ids[mine][grouped] - self.own_range.start, counts

    def _owners(self, ids: SampleIds) -> SampleIds:
        return np.searchsorted(self._starts, ids, side="right") - 1

    def _grouped(self, steps: SampleIds, ranks: SampleIds) -> tuple[SampleIds, SampleIds]:
        keys = steps * self._shape[1] + ranks
        counts = np.bincount(keys, minlength=self._shape[0] * self._shape[1])
        return np.argsort(keys, kind="stable"), counts.reshape(self._shape)


def _steps(sizes: Sequence[int]) -> SampleIds:
    return np.repeat(np.arange(len(sizes)), sizes)


def _starts(counts: SampleIds) -> SampleIds:
    sizes = counts.sum(axis=1)
    return np.repeat(np.cumsum(sizes) - sizes, sizes)


@dataclass(frozen=True)
class ShardTransfer:
    """One step's exchange, as tensors on the device and counts; ``ids`` [n] are the batch's."""

    sends: Tensor
    send_counts: list[int]
    order: Tensor
    receive_counts: list[int]
    ids: Tensor

    def gather(self, shard: Tensor) -> Tensor:
        """The batch's samples, of this rank's shard and those of others; all ranks ask together."""
        chosen = shard.index_select(0, self.sends)
        came = all_to_all_samples(chosen, self.receive_counts, self.send_counts)
        return came.index_select(0, self.order)


def shard_transfers(routes: ShardRoutes, device: torch.device) -> Iterator[ShardTransfer]:
    """The exchange of every step of an epoch; nothing is exchanged before it is asked for."""
    numbers = upload(np.concatenate([routes.sends, routes.order, routes.ids]), device)
    lengths = [len(routes.sends), len(routes.order), len(routes.ids)]
    sends, places, ids = torch.split(numbers, lengths)
    sent = pairwise(np.cumsum([0, *map(sum, routes.send_counts)]))
    came = pairwise(np.cumsum([0, *map(sum, routes.receive_counts)]))
    steps = zip(sent, came, routes.send_counts, routes.receive_counts, strict=True)
    for (first, last), (start, stop), send_counts, receive_counts in steps:
        own = slice(start, stop)
        yield ShardTransfer(sends[first:last], send_counts, places[own], receive_counts, ids[own])


def sharding_note(data_name: str, ranks: int) -> str:
    """What a reader has to know of sharded data."""
    return (
        f"the {data_name} does not fit whole: it is sharded over {ranks} devices, which exchange "
        "samples in every step"
    )


class ShardedSource(DeviceSource[ShardRoutes]):
    """This rank's part of the data set on its device; a batch is its samples, as a loader's is."""

    def __init__(
        self, arrays: DataSetArrays, sampler: BatchKeySampler, task: Task, device: torch.device
    ) -> None:
        samples = len(arrays.train_labels)
        self._router = ShardRouter(samples, sampler, task.rank, task.world_size)
        self._ranks = task.world_size
        own = slice(self._router.own_range.start, self._router.own_range.stop)
        super().__init__(arrays.train_images[own], arrays.train_labels[own], sampler, device)

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        return (("sharded", sharding_note("training set", self._ranks)),)

    def build_route(self, order: SampleIds) -> ShardRoutes:
        return self._router.routes(order)

    def batch_tensors(self, route: ShardRoutes) -> Iterator[Tensors]:
        for trade in shard_transfers(route, self._device):
            yield trade.gather(self._images), trade.gather(self._labels), trade.ids

    def unpack(self, tensors: Tensors) -> SampleTensors:
        return SampleTensors(*tensors)


def all_to_all_samples(own: Tensor, receive_counts: list[int], send_counts: list[int]) -> Tensor:
    """What the other ranks send this one, in their order; ``own`` is cut by ``send_counts``."""
    received = own.new_empty((sum(receive_counts), *own.shape[1:]))
    dist.all_to_all_single(_as_bytes(received), _as_bytes(own), receive_counts, send_counts)
    return received


def _as_bytes(samples: Tensor) -> Tensor:
    row_bytes = prod(samples.shape[1:]) * samples.element_size()
    return samples.view(-1).view(torch.uint8).view(len(samples), row_bytes)
