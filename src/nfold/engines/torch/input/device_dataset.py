"""Resident input: training data on the devices, whole or sharded.

A step selects its samples on the device. If the data do not fit on each device, each holds a shard
and ranks exchange samples in every step. Samples, order and hashes are those of a loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from nfold.core.errors import OutOfMemory
from nfold.data.arrays import DataSetArrays
from nfold.engines.base import Task
from nfold.engines.sampling import RankSlice, SampleIds, hash_ids, split_batch
from nfold.engines.torch.batch import Batch, SampleTensors, Tensors
from nfold.engines.torch.communication.data_parallel import all_reduce_min
from nfold.engines.torch.devices import Devices, free_bytes
from nfold.engines.torch.input.dataloader import BatchKeySampler, BatchSource

CHUNK_BYTES = 2**26  # copied at a time: a memory-mapped data set need not fit into memory
Route = TypeVar("Route")  # computed on the host for all steps of an epoch


class EpochPrefetcher(Generic[Route]):
    """Calls ``make`` for an epoch; a thread makes the next epoch's in the meantime."""

    def __init__(self, make: Callable[[int], Route]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="order")
        self._begun: dict[int, Future[Route]] = {}
        self._begin(0)

    def get(self, epoch: int) -> Route:
        self._begin(epoch)
        future = self._begun.pop(epoch)
        self._begin(epoch + 1)
        return future.result()

    def _begin(self, epoch: int) -> None:
        if epoch not in self._begun:
            self._begun = {epoch: self._thread.submit(self._make, epoch)}


@dataclass(slots=True)
class Selection:
    """The samples ``ids`` [n] of one step or micro-batch, on the device."""

    ids: Tensor

    def gather(self, whole: Tensor) -> Tensor:
        """Return the samples of a whole array."""
        return whole[self.ids]


class ArraySelector:
    """Selects the samples of every slice of an epoch from arrays that the device holds whole.

    ``positions`` are those of all slices, which begin at ``offsets``. The device holds ``own_rows``.
    """

    own_rows = slice(None)

    def __init__(self, slices: Sequence[RankSlice], device: torch.device) -> None:
        self.positions = slice_positions(slices)
        self.offsets = np.cumsum([0, *(len(cut.positions) for cut in slices)])
        self.device = device

    def prepare(self, order: SampleIds) -> Any:
        """Return what ``selections`` needs, from the order of all ranks' samples; in a thread."""
        return order[self.positions]

    def slice_ids(self, prepared: Any) -> Iterator[Tensor]:
        """Yield the sample ids of every slice, on the device."""
        ids = upload(prepared, self.device)
        for start, stop in pairwise(self.offsets.tolist()):
            yield ids[start:stop]

    def selections(self, prepared: Any) -> Iterator[Selection]:
        return map(Selection, self.slice_ids(prepared))


class ResidentSource(BatchSource):
    """The whole data set on this rank's device; a batch is the ids of its samples.

    A thread prepares the next epoch: 50,000 samples take 22 ms, a quarter of an epoch of cnn10 on
    four H200s.
    """

    def __init__(
        self,
        arrays: DataSetArrays,
        sampler: BatchKeySampler,
        device: torch.device,
        selector: ArraySelector | None = None,
    ) -> None:
        self.epoch = 0
        self._sampler = sampler
        self._device = device
        self._selector = selector or ArraySelector(sampler.slices, device)
        rows = self._selector.own_rows
        self._images = copy_in_chunks(arrays.train_images[rows], device)
        self._labels = copy_in_chunks(arrays.train_labels[rows], device)
        self.data_bytes = self._images.nbytes + self._labels.nbytes
        self._prefetcher = EpochPrefetcher(self._prepare_epoch)

    def batch_tensors(self, prepared: Any) -> Iterator[Tensors]:
        """Yield the tensors of every batch of an epoch, for ``unpack``."""
        return zip(self._selector.slice_ids(prepared), strict=True)

    def unpack(self, tensors: Tensors) -> SampleTensors:
        (ids,) = tensors
        return SampleTensors(
            self._images.index_select(0, ids), self._labels.index_select(0, ids), ids
        )

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        self._sampler.epoch = self.epoch
        for epoch, cuts in self._sampler.epochs():
            yield from self._batches(epoch, cuts)

    def _batches(self, epoch: int, cuts: list[RankSlice]) -> Iterator[Batch]:
        prepared, hashes = self._prefetcher.get(epoch)
        epoch_tensor = torch.full((), epoch, dtype=torch.int64, device=self._device)
        for cut, tensors, hashed in zip(cuts, self.batch_tensors(prepared), hashes, strict=False):
            share = cut.share
            yield Batch(
                tensors=tensors,
                epoch=epoch_tensor,
                count=share.count,
                global_count=share.global_count,
                sample_hash=hashed,
            )

    def _prepare_epoch(self, epoch: int) -> tuple[Any, list[int]]:
        order = self._sampler.epoch_order(epoch)
        hashes = hash_ids(order[self._selector.positions])
        counted = np.array([not cut.is_padding for cut in self._sampler.slices], dtype=np.uint64)
        sums = np.add.reduceat(hashes, self._selector.offsets[:-1]) * counted
        return self._selector.prepare(order), sums.tolist()


def slice_positions(slices: Sequence[RankSlice]) -> SampleIds:
    return np.concatenate([np.empty(0, np.int64), *(cut.positions for cut in slices)])


def copy_in_chunks(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    target = torch.empty(array.shape, dtype=kind, device=device)
    rows = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        part = np.array(array[start : start + rows])
        target[start : start + rows].copy_(torch.from_numpy(part))
    return target


def upload(numbers: SampleIds, device: torch.device) -> Tensor:
    """Copy to the device; on a GPU from page-locked memory, so that the host does not wait."""
    on_host = torch.from_numpy(numbers)
    if device.type == "cuda":
        return on_host.pin_memory().to(device, non_blocking=True)
    return on_host


MAX_FREE_FRACTION = 0.8  # part of a device's free memory that a data set may take


def fits(needed_bytes: int, free_bytes: int) -> bool:
    return needed_bytes <= MAX_FREE_FRACTION * free_bytes


def check_fits(
    needed_bytes: int,
    free_bytes: int,
    device_name: str,
    *,
    sharded_bytes: int | None = None,
    advice: str = "--input loader",
) -> None:
    """Raise OutOfMemory if a data set fits neither whole nor, with ``sharded_bytes``, sharded.

    ``advice`` is the next step in the message.
    """
    if fits(needed_bytes if sharded_bytes is None else sharded_bytes, free_bytes):
        return
    sharded = "" if sharded_bytes is None else f" ({_gib(sharded_bytes)} sharded)"
    raise OutOfMemory(
        f"input 'resident' needs {_gib(needed_bytes)}{sharded} on {device_name}; allowed are "
        f"{MAX_FREE_FRACTION:.0%} of the free {_gib(free_bytes)}; next: {advice}"
    )


def fits_unsharded(
    needed_bytes: int,
    samples: int,
    free_bytes: int,
    *,
    ranks: int,
    device: torch.device,
    advice: str = "--input loader",
    can_shard: bool = True,
) -> bool:
    """Return whether every device can hold the whole data set; OutOfMemory if not even its shard.

    Ranks agree on the smallest free memory: all must call this. CPU devices share the host's
    memory, which must hold a copy per rank, or all shards.
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
    sharded = shard if can_shard and ranks > 1 else None
    check_fits(whole, least, where, sharded_bytes=sharded, advice=advice)
    return False


def available_bytes(task: Task, devices: Devices) -> int:
    """Return the free memory for this rank's device, at most that of the task's machine."""
    found = free_bytes(devices.primary)
    if not devices.is_cuda:
        return min(found, task.machine.memory_bytes)
    declared = {gpu.index: gpu.memory_bytes for gpu in task.machine.gpus}
    return min(found, declared.get(devices.primary.index) or found)


def dataset_bytes(arrays: DataSetArrays) -> int:
    return arrays.train_images.nbytes + arrays.train_labels.nbytes


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"


# Sharding: every rank knows the order of an epoch, and so which samples each rank needs from which
# other in each step. A step's exchange is one all-to-all of images and one of labels, in order with
# the step's own collectives. The host never waits for the device.

Counts = list[list[int]]  # samples by step and rank


@dataclass(frozen=True)
class ShardRoutes:
    """What one rank sends and receives, and the order of what arrives, for all steps of an epoch.

    By step: ``sends`` are positions in the rank's shard, ordered by receiving rank; ``order`` is
    the position of each sample of the batch among the received ones, and ``ids`` its id.
    """

    sends: SampleIds
    send_counts: Counts
    order: SampleIds
    receive_counts: Counts
    ids: SampleIds


class ShardedSelector(ArraySelector):
    """Selects the samples of every slice of an epoch from the shards of all ranks.

    Rank r holds the r-th of equal parts, ``own_rows``. ``slices`` per rank say which rank needs
    which samples in which step.
    """

    def __init__(
        self,
        samples: int,
        slices: Sequence[Sequence[RankSlice]],
        rank: int,
        device: torch.device,
    ) -> None:
        super().__init__(slices[rank], device)
        ranks = len(slices)
        shards = [split_batch(samples, each, ranks, micro_batches=1)[0] for each in range(ranks)]
        self.own_rows = slice(shards[rank].start, shards[rank].stop)
        self._starts = np.array([shard.start for shard in shards])
        self._rank = rank
        self._rank_positions = [slice_positions(each) for each in slices]
        self._steps = [
            np.repeat(np.arange(len(each)), [len(cut.positions) for cut in each]) for each in slices
        ]
        self._shape = len(slices[rank]), ranks

    def prepare(self, order: SampleIds) -> ShardRoutes:
        sends, send_counts = self._sends(order)
        ids = order[self.positions]
        arrival, receive_counts = self._grouped(self._steps[self._rank], self._owners(ids))
        sizes = receive_counts.sum(axis=1)
        positions = np.empty_like(arrival)
        positions[arrival] = np.arange(len(arrival)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return ShardRoutes(sends, send_counts.tolist(), positions, receive_counts.tolist(), ids)

    def _sends(self, order: SampleIds) -> tuple[SampleIds, SampleIds]:
        ids = np.concatenate([order[positions] for positions in self._rank_positions])
        steps = np.concatenate(self._steps)
        lengths = [len(positions) for positions in self._rank_positions]
        receivers = np.repeat(np.arange(len(lengths)), lengths)
        own = self._owners(ids) == self._rank
        grouped, counts = self._grouped(steps[own], receivers[own])
        return ids[own][grouped] - self.own_rows.start, counts

    def _owners(self, ids: SampleIds) -> SampleIds:
        return np.searchsorted(self._starts, ids, side="right") - 1

    def _grouped(self, steps: SampleIds, ranks: SampleIds) -> tuple[SampleIds, SampleIds]:
        keys = steps * self._shape[1] + ranks
        counts = np.bincount(keys, minlength=self._shape[0] * self._shape[1])
        return np.argsort(keys, kind="stable"), counts.reshape(self._shape)

    def selections(self, routes: ShardRoutes) -> Iterator[ShardTransfer]:
        numbers = upload(np.concatenate([routes.sends, routes.order, routes.ids]), self.device)
        lengths = [len(routes.sends), len(routes.order), len(routes.ids)]
        sends, order, ids = torch.split(numbers, lengths)
        sent = pairwise(np.cumsum([0, *map(sum, routes.send_counts)]))
        received = pairwise(np.cumsum([0, *map(sum, routes.receive_counts)]))
        steps = zip(sent, received, routes.send_counts, routes.receive_counts, strict=True)
        for (first, last), (start, stop), send_counts, receive_counts in steps:
            own = slice(start, stop)
            yield ShardTransfer(
                ids[own], sends[first:last], send_counts, order[own], receive_counts
            )


@dataclass(slots=True)
class ShardTransfer(Selection):
    """A selection from shards: one exchange per array, as tensors on the device and counts."""

    sends: Tensor
    send_counts: list[int]
    order: Tensor
    receive_counts: list[int]

    def gather(self, shard: Tensor) -> Tensor:
        """Return the batch's samples, from this shard and others; all ranks must call it."""
        chosen = shard.index_select(0, self.sends)
        received = all_to_all_samples(chosen, self.receive_counts, self.send_counts)
        return received.index_select(0, self.order)


def sharding_note(data_name: str, ranks: int) -> str:
    return (
        f"the {data_name} does not fit on each device: it is sharded over {ranks} devices, which "
        "exchange samples in every step"
    )


class ShardedSource(ResidentSource):
    """This rank's shard of the data set on its device; a batch is its samples."""

    def __init__(
        self, arrays: DataSetArrays, sampler: BatchKeySampler, task: Task, device: torch.device
    ) -> None:
        slices = [sampler.slices_of(rank) for rank in range(task.world_size)]
        selector = ShardedSelector(len(arrays.train_labels), slices, task.rank, device)
        super().__init__(arrays, sampler, device, selector)
        self.notes = (("sharded", sharding_note("training set", task.world_size)),)

    def batch_tensors(self, prepared: Any) -> Iterator[Tensors]:
        for selection in self._selector.selections(prepared):
            yield selection.gather(self._images), selection.gather(self._labels), selection.ids

    def unpack(self, tensors: Tensors) -> SampleTensors:
        return SampleTensors(*tensors)


def all_to_all_samples(own: Tensor, receive_counts: list[int], send_counts: list[int]) -> Tensor:
    """Return the samples that other ranks send, by rank; ``own`` is cut by ``send_counts``."""
    received = own.new_empty((sum(receive_counts), *own.shape[1:]))
    dist.all_to_all_single(_as_bytes(received), _as_bytes(own), receive_counts, send_counts)
    return received


def _as_bytes(samples: Tensor) -> Tensor:
    row_bytes = prod(samples.shape[1:]) * samples.element_size()
    return samples.view(-1).view(torch.uint8).view(len(samples), row_bytes)
