"""The samples of each rank in each step of a user's loader, and the reading of arrays.

The order depends on seed and epoch only. A global batch is cut into micro-batches × ranks contiguous
slices whose lengths differ by at most one: a batch that does not divide and an incomplete last batch
are used whole.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from nfold.core.errors import UsageError
from nfold.engines.sampling import SHUFFLE_KEY, RankSlice, permutation, split_batch
from nfold.engines.torch.batch import BatchShare
from nfold.engines.torch.devices import free_bytes
from nfold.engines.torch.input.dataloader import to_device
from nfold.engines.torch.input.device_dataset import (
    EpochPrefetcher,
    ShardRouter,
    fits,
    fits_unsharded,
    shard_transfers,
    sharding_note,
)
from nfold.engines.torch.nested_tensors import collect_tensors, map_tensors


@dataclass(frozen=True)
class SampleSlice:
    """Positions ``first`` to ``last`` - 1 of an epoch's order, and their share of the step.

    A rank without a sample in a training step gets one that counts 0 (``is_padding``), because every
    rank must take part in the exchange.
    """

    first: int
    last: int
    share: BatchShare
    is_padding: bool = False


@dataclass(frozen=True, kw_only=True)
class BatchDivision:
    """Divides ``batch`` samples per step over ``ranks``, in ``micro_batches`` each."""

    batch: int
    rank: int
    ranks: int
    micro_batches: int = 1
    drop_last: bool = False

    def steps_per_epoch(self, samples: int) -> int:
        whole = samples / self.batch
        return math.floor(whole) if self.drop_last else math.ceil(whole)

    def split(self, start: int, count: int) -> Iterator[SampleSlice]:
        """Yield this rank's slices of the global batch of ``count`` samples from ``start`` on."""
        pieces = split_batch(count, self.rank, self.ranks, self.micro_batches)
        for number, piece in enumerate(pieces, start=1):
            share = BatchShare(
                count=len(piece),
                global_count=count,
                micro_batches=self.micro_batches,
                is_last=number == self.micro_batches,
            )
            part = piece or range(1)
            yield SampleSlice(start + part.start, start + part.stop, share, is_padding=not piece)

    def epoch_slices(self, samples: int, skip: int = 0) -> Iterator[SampleSlice]:
        """Yield this rank's slices of an epoch, from step ``skip`` on."""
        for step in range(skip, self.steps_per_epoch(samples)):
            start = step * self.batch
            yield from self.split(start, min(self.batch, samples - start))

    def rank_slices(self, samples: int, rank: int) -> list[RankSlice]:
        return [
            RankSlice(np.arange(part.first, part.last), part.share.count, part.share.global_count)
            for part in replace(self, rank=rank).epoch_slices(samples)
        ]


def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool) -> Tensor:
    if not shuffle:
        return torch.arange(samples)
    return torch.from_numpy(permutation(seed, epoch, samples, SHUFFLE_KEY))


# batch on the device, sample ids [n], epoch -> batch
AugmentBatch = Callable[[Any, Tensor, int], Any]
FetchedBatch = tuple[SampleSlice, Any, Tensor]  # a slice, its batch, its sample ids [n]


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """The settings of a loader. Training loaders (``train``) set the current share.

    ``input`` is ``resident`` (on the device), ``loader``, or None: on a GPU if arrays fit, else by a
    loader. ``options`` are those of DataLoader.
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
        return epoch_order(samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle)


def as_arrays(data: Any) -> Any | None:
    """Return ``data`` as tensors in its own structure if it consists of arrays, else None."""
    if isinstance(data, TensorDataset):
        if type(data).__getitem__ is not TensorDataset.__getitem__:
            return None  # it processes each sample
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
                f"an array of {array.dtype}: allowed are numbers and booleans; next: convert it to "
                "numbers, or pass a list of samples"
            ) from None


def _all_or_none(found: Iterable[Any]) -> tuple[Any, ...] | None:
    values = tuple(found)
    return None if any(value is None for value in values) else values


def sample_count(arrays: Any) -> int:
    """Return the number of samples in ``arrays``. Raises UsageError if lengths differ."""
    lengths = [len(tensor) if tensor.dim() else 0 for tensor in collect_tensors(arrays)]
    if len(set(lengths)) != 1:
        raise UsageError(f"arrays of {lengths} samples: allowed are arrays of equal length")
    return lengths[0]


def total_bytes(arrays: Any) -> int:
    return sum(tensor.nbytes for tensor in collect_tensors(arrays))


def is_map_style(data: Any) -> bool:
    if isinstance(data, IterableDataset):
        return False
    return isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def iterator_factory(data: Any) -> Callable[[], Iterator[Any]]:
    """Return a function that reads ``data`` from its beginning.

    Raises UsageError for a generator, which can be read only once.
    """
    if isinstance(data, Iterator):
        raise UsageError(
            f"a {type(data).__name__} can be read only once, a data set is read once per epoch; "
            "next: pass the function that makes it: run.loader(make_samples, ...)"
        )
    if isinstance(data, Iterable):
        return lambda: iter(data)
    if callable(data):
        return lambda: iter(data())
    raise UsageError(
        f"a {type(data).__name__} is no data set; allowed are arrays, data sets with "
        "__getitem__ and __len__, iterables, and functions that return an iterator"
    )


LOADER_ADVICE = 'nfold.Run(input="loader")'


def place_arrays(arrays: Any, config: LoaderConfig) -> ArrayReader | ShardedArrayReader:
    """Return a reader of the arrays, placed as ``input`` says. Raises OutOfMemory.

    With ``resident`` all ranks must call this together.
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
    """Whole tensors, in memory or, ``on_device``, on the device: batches are indexed."""

    def __init__(self, arrays: Any, config: LoaderConfig, *, on_device: bool) -> None:
        self.samples: int | None = sample_count(arrays)
        self._config = config
        self.on_device = on_device
        self._arrays = to_device(arrays, config.device) if self.on_device else arrays

    def read_epoch(self, epoch: int, skip: int) -> Iterable[FetchedBatch]:
        config, samples = self._config, self.samples or 0
        order = config.epoch_order(samples, epoch)
        if self.on_device:
            order = order.to(config.device)
        for part in config.division.epoch_slices(samples, skip):
            ids = order[part.first : part.last]
            yield part, map_tensors(self._arrays, itemgetter(ids)), ids


class ShardedArrayReader:
    """This rank's shard of the arrays on its device; ranks exchange every batch."""

    on_device = True

    def __init__(self, arrays: Any, config: LoaderConfig) -> None:
        self.samples: int | None = sample_count(arrays)
        self._config = config
        division = config.division
        slices = [division.rank_slices(self.samples, rank) for rank in range(division.ranks)]
        self._router = ShardRouter(self.samples, slices, division.rank)
        own = slice(self._router.own_range.start, self._router.own_range.stop)
        how: dict[str, Any] = {"copy": True, "memory_format": torch.contiguous_format}
        self._arrays = map_tensors(arrays, lambda whole: whole[own].to(config.device, **how))
        self._prefetcher = EpochPrefetcher(
            lambda epoch: self._router.routes(config.epoch_order(self.samples or 0, epoch).numpy())
        )
        if division.rank == 0:
            warnings.warn(
                sharding_note("data set", division.ranks), stacklevel=7
            )  # run.loader's caller

    def read_epoch(self, epoch: int, skip: int) -> Iterable[FetchedBatch]:
        division, samples = self._config.division, self.samples or 0
        all_steps = shard_transfers(self._prefetcher.get(epoch), self._config.device)
        transfers = islice(all_steps, skip * division.micro_batches, None)
        for part, transfer in zip(division.epoch_slices(samples, skip), transfers, strict=True):
            yield part, map_tensors(self._arrays, transfer.gather), transfer.ids
