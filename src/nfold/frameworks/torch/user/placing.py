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

from nfold.frameworks.stream import Cut
from nfold.frameworks.torch.devices import free_bytes
from nfold.frameworks.torch.nested import over_tensors
from nfold.frameworks.torch.placed import Ahead
from nfold.frameworks.torch.resident import fits, fits_whole
from nfold.frameworks.torch.sharded import Routes, Shards, doubt, trades
from nfold.frameworks.torch.user.batches import Division
from nfold.frameworks.torch.user.moving import moved
from nfold.frameworks.torch.user.recipe import Fetched, Recipe
from nfold.frameworks.torch.user.source import bytes_of, length_of

INSTEAD = 'nfold.Run(input="loader")'
"""What a script does with data that fit on no device."""


def placed(arrays: Any, recipe: Recipe) -> Arrays | ShardedArrays:
    """The arrays where the recipe's ``input`` says; OutOfMemory where resident ones do not fit.

    Where it is ``resident`` all ranks must ask together: they choose alike.
    """
    needed, free, device = bytes_of(arrays), free_bytes(recipe.device), recipe.device
    if recipe.input != "resident":
        fit = recipe.input is None and device.type == "cuda" and fits(needed, free)
        return Arrays(arrays, recipe, on_device=fit)
    ranks = recipe.division.ranks
    samples = length_of(arrays)
    if fits_whole(needed, samples, free, ranks=ranks, device=device, instead=INSTEAD):
        return Arrays(arrays, recipe, on_device=True)
    if recipe.division.steps(samples) == 0:
        return Arrays(arrays, recipe, on_device=False)
    return ShardedArrays(arrays, recipe)


class Arrays:
    """Tensors, whole, in memory or where ``on_device`` on the device: batches are indexed."""

    def __init__(self, arrays: Any, recipe: Recipe, *, on_device: bool) -> None:
        self.samples: int | None = length_of(arrays)
        self._recipe = recipe
        self.on_device = on_device
        self._arrays = moved(arrays, recipe.device) if self.on_device else arrays

    def epoch(self, epoch: int, skip: int) -> Iterable[Fetched]:
        """The batches of an epoch from step ``skip`` on."""
        recipe, samples = self._recipe, self.samples or 0
        ids = recipe.order(samples, epoch)
        if self.on_device:
            ids = ids.to(recipe.device)
        for part in recipe.division.epoch(samples, skip):
            own = ids[part.first : part.last]
            yield part, self._take(own), own

    def _take(self, ids: Tensor) -> Any:
        return over_tensors(self._arrays, lambda tensor: tensor[ids])


class ShardedArrays:
    """This rank's part of the arrays on its device; every batch is exchanged between the ranks."""

    on_device = True

    def __init__(self, arrays: Any, recipe: Recipe) -> None:
        self.samples: int | None = length_of(arrays)
        self._recipe = recipe
        division = recipe.division
        cuts = Cuts(division, self.samples)
        self._shards = Shards(self.samples, cuts, division.rank, division.ranks)
        own = slice(self._shards.own.start, self._shards.own.stop)
        self._arrays = over_tensors(arrays, lambda tensor: _shard(tensor[own], recipe.device))
        self._ahead = Ahead(self._routes)
        if division.rank == 0:
            warnings.warn(doubt("data set", division.ranks), stacklevel=6)  # run.loader's caller

    def epoch(self, epoch: int, skip: int) -> Iterable[Fetched]:
        """The batches of an epoch from step ``skip`` on, exchanged as they are asked for."""
        division, samples = self._recipe.division, self.samples or 0
        all_steps = trades(self._ahead.take(epoch), self._recipe.device)
        left = islice(all_steps, skip * division.parts, None)
        for part, trade in zip(division.epoch(samples, skip), left, strict=True):
            yield part, over_tensors(self._arrays, trade.of), trade.ids

    def _routes(self, epoch: int) -> Routes:
        return self._shards.routes(self._recipe.order(self.samples or 0, epoch).numpy())


class Cuts:
    """Where the samples of each part of each step lie, as ``nfold train`` says it."""

    def __init__(self, division: Division, samples: int) -> None:
        self._division = division
        self._samples = samples

    def cuts_of(self, rank: int) -> list[Cut]:
        """A rank's part of every part of a step."""
        return [
            Cut(np.arange(part.first, part.last), part.share.count, part.share.global_count)
            for part in replace(self._division, rank=rank).epoch(self._samples)
        ]


def _shard(part: Tensor, device: torch.device) -> Tensor:
    """A copy: the whole may then be freed."""
    return part.to(device, copy=True, memory_format=torch.contiguous_format)
