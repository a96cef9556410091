"""Which samples each rank gets in each step: the same global batches on any number of devices.

The order depends on (seed, epoch) alone. A global batch is cut into parts × ranks contiguous
slices whose lengths differ by at most one, so that a batch that does not divide and an
incomplete last batch are used whole.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from nfold.core.errors import UsageError
from nfold.engines.sampling import SHUFFLE_KEY, RankSlice, permutation
from nfold.engines.torch.batch import BatchShare
from nfold.engines.torch.devices import free_bytes
from nfold.engines.torch.input.dataloader import to_device
from nfold.engines.torch.input.device_dataset import (
    EpochPrefetcher,
    ShardRouter,
    ShardRoutes,
    fits,
    fits_unsharded,
    shard_transfers,
    sharding_note,
)
from nfold.engines.torch.nested_tensors import map_tensors


@dataclass(frozen=True)
class SampleSlice:
    """Sample numbers ``first`` to ``last`` - 1 of an epoch's order, and what they count for.

    A rank without a sample in a training step gets one that counts nothing, because every rank
    must take part in the exchange; ``padded`` says so.
    """

    first: int
    last: int
    share: BatchShare
    is_padding: bool = False


@dataclass(frozen=True, kw_only=True)
class BatchDivision:
    """How steps are divided: ``batch`` samples a step, over ``ranks``, in ``parts`` each."""

    batch: int
    rank: int
    ranks: int
    micro_batches: int = 1
    drop_last: bool = False

    def steps_per_epoch(self, samples: int) -> int:
        """Steps in an epoch of so many samples."""
        whole = samples / self.batch
        return math.floor(whole) if self.drop_last else math.ceil(whole)

    def split(self, start: int, count: int) -> Iterator[SampleSlice]:
        """This rank's slices of the global batch of ``count`` samples from ``start`` on."""
        pieces = self.micro_batches * self.ranks
        for part in range(self.micro_batches):
            place = part * self.ranks + self.rank
            first, last = place * count // pieces, (place + 1) * count // pieces
            share = BatchShare(
                count=last - first,
                global_count=count,
                micro_batches=self.micro_batches,
                is_last=part == self.micro_batches - 1,
            )
            empty = first == last
            if empty:
                first, last = 0, 1
            yield SampleSlice(start + first, start + last, share, is_padding=empty)

    def epoch_slices(self, samples: int, skip: int = 0) -> Iterator[SampleSlice]:
        """This rank's slices of a whole epoch, from step ``skip`` on."""
        for step in range(skip, self.steps_per_epoch(samples)):
            start = step * self.batch
            yield from self.split(start, min(self.batch, samples - start))


def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """The order of an epoch: int64 [samples], the same on every rank."""
    if not shuffle:
        return torch.arange(samples)
    return torch.from_numpy(permutation(seed, epoch, samples, SHUFFLE_KEY))


AugmentBatch = Callable[[Any, Tensor, int], Any]
"""A batch on the device, its samples' numbers [n] and its epoch to the batch that is trained on."""
FetchedBatch = tuple[SampleSlice, Any, Tensor]
"""A part of a step, its batch, and the numbers of its samples [n]."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How a loader treats its data; ``train`` loaders tell the exchange what batches weigh.

    ``input`` is ``resident`` (on the device), ``loader``, or None for arrays on GPUs where they
    fit and everything else by a loader. ``options`` are DataLoader's.
    """

    division: BatchDivision
    device: torch.device
    seed: int
    shuffle: bool
    train: bool
    workers: int = 0
    input: str | None = None
    augment: AugmentBatch | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    options: dict[str, Any] = field(default_factory=dict)

    def epoch_order(self, samples: int, epoch: int) -> Tensor:
        """The order of an epoch of so many samples: int64 [samples], the same on every rank."""
        return epoch_order(samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle)


# What a user trains on, behind one interface: fetch the samples of these ids as one batch.
#
# Arrays (tensors, NumPy arrays, and tuples or dictionaries of them) are indexed whole. Map-style
# data sets, lists of samples among them, are read sample by sample and collated as DataLoader does
# it. Anything that can only be iterated is read in every rank, each keeping its own samples.

Sample = Any


def as_arrays(data: Any) -> Any | None:
    """``data`` as tensors in its own structure where it is made of arrays, else None."""
    if isinstance(data, TensorDataset):
        if type(data).__getitem__ is not TensorDataset.__getitem__:
            return None  # it does something to each sample
        return tuple(data.tensors)
    if isinstance(data, np.ndarray):
        return _from_numpy(data)
    if isinstance(data, Tensor):
        return data
    if type(data) is tuple and data:
        return _all_or_none(as_arrays(item) for item in data)
    if type(data) is dict and data:
        values = _all_or_none(as_arrays(item) for item in data.values())
        return None if values is None else dict(zip(data, values, strict=True))
    return None


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if min(array.strides, default=0) < 0:
        array = array.copy()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        try:
            return torch.from_numpy(array)
        except TypeError:
            raise UsageError(
                f"an array of {array.dtype}: allowed are numbers and truth values; next: numbers "
                "in their place, or a list of samples"
            ) from None


def _all_or_none(found: Iterable[Any]) -> tuple[Any, ...] | None:
    values = tuple(found)
    return None if any(value is None for value in values) else values


def sample_count(arrays: Any) -> int:
    """How many samples ``arrays`` hold; UsageError where its arrays disagree."""
    lengths: list[int] = []
    map_tensors(arrays, lambda tensor: _note_length(tensor, lengths))
    if len(set(lengths)) != 1:
        raise UsageError(f"arrays of {lengths} samples: allowed are arrays of one length")
    return lengths[0]


def _note_length(tensor: Tensor, lengths: list[int]) -> Tensor:
    lengths.append(len(tensor) if tensor.dim() else 0)
    return tensor


def total_bytes(arrays: Any) -> int:
    """Bytes of all arrays together."""
    sizes: list[int] = []
    map_tensors(arrays, lambda tensor: _note_bytes(tensor, sizes))
    return sum(sizes)


def _note_bytes(tensor: Tensor, sizes: list[int]) -> Tensor:
    sizes.append(tensor.numel() * tensor.element_size())
    return tensor


def is_map_style(data: Any) -> bool:
    """Whether samples can be read by their number."""
    if isinstance(data, IterableDataset):
        return False
    return isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def iterator_factory(data: Any) -> Callable[[], Iterator[Sample]]:
    """A function that starts reading ``data`` from its beginning.

    Raises UsageError for a generator: it ends once, and an epoch begins more than once.
    """
    if isinstance(data, Iterator):
        raise UsageError(
            f"a {type(data).__name__} can be read once only, a data set once an epoch; next: pass "
            "the function that makes it: run.loader(make_samples, ...)"
        )
    if isinstance(data, Iterable):
        return lambda: iter(data)
    if callable(data):
        return lambda: iter(data())
    raise UsageError(
        f"a {type(data).__name__} is no data set: allowed are arrays, data sets with "
        "__getitem__ and __len__, iterables, and functions that return an iterator"
    )


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
    return part.to(device, copy=True, memory_format=torch.contiguous_format)
