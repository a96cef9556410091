"""Resident input over several devices: each holds a part of the data set, steps exchange samples.

Every rank knows the order of an epoch, and so, before it begins, which samples each rank needs
of which other in each step. Nothing is asked for and nothing waits for the device: a step's
exchange is one all-to-all of images and one of labels, in order with the step's own collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nfold.data.arrays import DataSetArrays
from nfold.frameworks.base import Task
from nfold.frameworks.stream import RankSlice, SampleIds
from nfold.frameworks.torch.batch import SampleTensors, Tensors
from nfold.frameworks.torch.input import BatchKeySampler
from nfold.frameworks.torch.placed import DeviceSource, slice_positions, upload

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
        """How to sort samples by step, then rank, then as they were; the counts [steps, ranks]."""
        keys = steps * self._shape[1] + ranks
        counts = np.bincount(keys, minlength=self._shape[0] * self._shape[1])
        return np.argsort(keys, kind="stable"), counts.reshape(self._shape)


def _steps(sizes: Sequence[int]) -> SampleIds:
    """The step of every sample, of steps of these sizes."""
    return np.repeat(np.arange(len(sizes)), sizes)


def _starts(counts: SampleIds) -> SampleIds:
    """For every sample the number of those in earlier steps, by counts [steps, ranks]."""
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
        """That steps exchange samples, which takes time."""
        return (("sharded", sharding_note("training set", self._ranks)),)

    def build_route(self, order: SampleIds) -> ShardRoutes:
        """Sends and receipts of every step."""
        return self._router.routes(order)

    def batch_tensors(self, route: ShardRoutes) -> Iterator[Tensors]:
        """The samples of every batch, exchanged when it is asked for; all ranks ask together."""
        for trade in shard_transfers(route, self._device):
            yield trade.gather(self._images), trade.gather(self._labels), trade.ids

    def unpack(self, tensors: Tensors) -> SampleTensors:
        """The samples, which the tensors are."""
        return SampleTensors(*tensors)


def all_to_all_samples(own: Tensor, receive_counts: list[int], send_counts: list[int]) -> Tensor:
    """What the other ranks send this one, in their order; ``own`` is cut by ``send_counts``."""
    received = own.new_empty((sum(receive_counts), *own.shape[1:]))
    dist.all_to_all_single(_as_bytes(received), _as_bytes(own), receive_counts, send_counts)
    return received


def _as_bytes(samples: Tensor) -> Tensor:
    """The memory of samples [n, ...] as uint8 [n, bytes]: NCCL and gloo lack some types (int16)."""
    row_bytes = prod(samples.shape[1:]) * samples.element_size()
    return samples.view(-1).view(torch.uint8).view(len(samples), row_bytes)
