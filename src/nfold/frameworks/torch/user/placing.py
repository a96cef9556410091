"""Arrays of a user's: on the host, whole on every device, or sharded over the devices."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nfold.frameworks.stream import RankSlice
from nfold.frameworks.torch.devices import free_bytes
from nfold.frameworks.torch.nested import map_tensors
from nfold.frameworks.torch.placed import EpochPrefetcher
from nfold.frameworks.torch.resident import fits, fits_unsharded
from nfold.frameworks.torch.sharded import ShardRouter, ShardRoutes, shard_transfers, sharding_note
from nfold.frameworks.torch.user.batches import BatchDivision
from nfold.frameworks.torch.user.moving import to_device
from nfold.frameworks.torch.user.recipe import FetchedBatch, LoaderConfig
from nfold.frameworks.torch.user.source import sample_count, total_bytes

LOADER_ADVICE = 'nfold.Run(input="loader")'
"""What a script does with data that fit on no device."""


def place_arrays(arrays: Any, config: LoaderConfig) -> ArrayReader | ShardedArrayReader:
    """The arrays where the recipe's ``input`` says; OutOfMemory where resident ones do not fit.

    Where it is ``resident`` all ranks must ask together: they choose alike.
    """
    needed, free, device = total_bytes(arrays), free_bytes(config.device), config.device
    if config.input != "resident":
        fit = config.input is None and device.type == "cuda" and fits(needed, free)
        return ArrayReader(arrays, config, on_device=fit)
    ranks = config.division.ranks
    samples = sample_count(arrays)
    if fits_unsharded(needed, samples, free, ranks=ranks, device=device, advice=LOADER_ADVICE):
        return ArrayReader(arrays, config, on_device=True)
    if config.division.steps_per_epoch(samples) == 0:
        return ArrayReader(arrays, config, on_device=False)
    return ShardedArrayReader(arrays, config)


class ArrayReader:
    """Tensors, whole, in memory or where ``on_device`` on the device: batches are indexed."""

    def __init__(self, arrays: Any, config: LoaderConfig, *, on_device: bool) -> None:
        self.samples: int | None = sample_count(arrays)
        self._config = config
        self.on_device = on_device
        self._arrays = to_device(arrays, config.device) if self.on_device else arrays

    def read_epoch(self, epoch: int, skip: int) -> Iterable[FetchedBatch]:
        """The batches of an epoch from step ``skip`` on."""
        recipe, samples = self._config, self.samples or 0
        ids = recipe.epoch_order(samples, epoch)
        if self.on_device:
            ids = ids.to(recipe.device)
        for part in recipe.division.epoch_slices(samples, skip):
            own = ids[part.first : part.last]
            yield part, self._take(own), own

    def _take(self, ids: Tensor) -> Any:
        return map_tensors(self._arrays, lambda tensor: tensor[ids])


class ShardedArrayReader:
    """This rank's part of the arrays on its device; every batch is exchanged between the ranks."""

    on_device = True

    def __init__(self, arrays: Any, config: LoaderConfig) -> None:
        self.samples: int | None = sample_count(arrays)
        self._config = config
        division = config.division
        cuts = DivisionSlices(division, self.samples)
        self._router = ShardRouter(self.samples, cuts, division.rank, division.ranks)
        own = slice(self._router.own_range.start, self._router.own_range.stop)
        self._arrays = map_tensors(arrays, lambda tensor: _copy_shard(tensor[own], config.device))
        self._prefetcher = EpochPrefetcher(self._routes)
        if division.rank == 0:
            warnings.warn(
                sharding_note("data set", division.ranks), stacklevel=6
            )  # run.loader's caller

    def read_epoch(self, epoch: int, skip: int) -> Iterable[FetchedBatch]:
        """The batches of an epoch from step ``skip`` on, exchanged as they are asked for."""
        division, samples = self._config.division, self.samples or 0
        all_steps = shard_transfers(self._prefetcher.get(epoch), self._config.device)
        left = islice(all_steps, skip * division.micro_batches, None)
        for part, trade in zip(division.epoch_slices(samples, skip), left, strict=True):
            yield part, map_tensors(self._arrays, trade.gather), trade.ids

    def _routes(self, epoch: int) -> ShardRoutes:
        return self._router.routes(self._config.epoch_order(self.samples or 0, epoch).numpy())


class DivisionSlices:
    """Where the samples of each part of each step lie, as ``nfold train`` says it."""

    def __init__(self, division: BatchDivision, samples: int) -> None:
        self._division = division
        self._samples = samples

    def slices_of(self, rank: int) -> list[RankSlice]:
        """A rank's part of every part of a step."""
        return [
            RankSlice(np.arange(part.first, part.last), part.share.count, part.share.global_count)
            for part in replace(self._division, rank=rank).epoch_slices(self._samples)
        ]


def _copy_shard(part: Tensor, device: torch.device) -> Tensor:
    """A copy: the whole may then be freed."""
    return part.to(device, copy=True, memory_format=torch.contiguous_format)
