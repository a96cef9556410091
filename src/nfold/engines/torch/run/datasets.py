"""The settings of a user's loader, and the reading of arrays."""

from __future__ import annotations

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
from nfold.engines.sampling import BatchDivision, RankSlice, SampleIds, epoch_order
from nfold.engines.torch.devices import free_bytes
from nfold.engines.torch.input.dataloader import to_device
from nfold.engines.torch.input.device_dataset import (
    ArraySelector,
    EpochPrefetcher,
    ShardedSelector,
    fits,
    fits_unsharded,
    sharding_note,
)
from nfold.engines.torch.nested_tensors import collect_tensors, map_tensors, yields_rows

# batch on the device, sample ids [n], epoch -> batch
AugmentBatch = Callable[[Any, Tensor, int], Any]
FetchedBatch = tuple[RankSlice, Any, Tensor]  # a slice, its batch, its sample ids [n]


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

    def epoch_order(self, samples: int, epoch: int) -> SampleIds:
        return epoch_order(samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle)


def as_arrays(data: Any) -> Any | None:
    """Return ``data`` as tensors in its own structure if it consists of arrays, else None."""
    if isinstance(data, TensorDataset):
        return tuple(data.tensors) if yields_rows(data) else None
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


CPU = torch.device("cpu")
LOADER_ADVICE = 'nfold.Run(input="loader")'


def place_arrays(arrays: Any, config: LoaderConfig) -> ArrayReader:
    """Return a reader of the arrays, placed as ``input`` says. Raises OutOfMemory.

    With ``resident`` all ranks must call this together.
    """
    needed, free, device = total_bytes(arrays), free_bytes(config.device), config.device
    if config.input != "resident":
        fit = config.input is None and device.type == "cuda" and fits(needed, free)
        return ArrayReader(arrays, config, on_device=fit)
    division, samples = config.division, sample_count(arrays)
    ranks = division.ranks
    if fits_unsharded(needed, samples, free, ranks=ranks, device=device, advice=LOADER_ADVICE):
        return ArrayReader(arrays, config, on_device=True)
    if division.steps_per_epoch(samples) == 0:
        return ArrayReader(arrays, config, on_device=False)
    if division.rank == 0:
        warnings.warn(sharding_note("data set", ranks), stacklevel=6)  # run.loader's caller
    return ArrayReader(arrays, config, on_device=True, sharded=True)


class ArrayReader:
    """Arrays in memory or, ``on_device``, on the device: whole, or this rank's shard of them."""

    def __init__(
        self, arrays: Any, config: LoaderConfig, *, on_device: bool, sharded: bool = False
    ) -> None:
        samples, division, device = sample_count(arrays), config.division, config.device
        self.samples: int | None = samples
        self.on_device = on_device
        self._division = division
        self._slices = list(division.epoch_slices(samples))
        self._selector = ArraySelector(self._slices, device if on_device else CPU)
        if sharded:
            ranks = [replace(division, rank=rank) for rank in range(division.ranks)]
            slices = [list(each.epoch_slices(samples)) for each in ranks]
            self._selector = ShardedSelector(samples, slices, division.rank, device)
            own, contiguous = self._selector.own_rows, torch.contiguous_format
            arrays = map_tensors(
                arrays,
                lambda whole: whole[own].to(device, copy=True, memory_format=contiguous),
            )
        elif on_device:
            arrays = to_device(arrays, device)
        self._arrays, prepare = arrays, self._selector.prepare
        self._prefetcher = EpochPrefetcher(
            lambda epoch: prepare(config.epoch_order(samples, epoch))
        )

    def read_epoch(self, epoch: int, skip: int) -> Iterable[FetchedBatch]:
        selections = self._selector.selections(self._prefetcher.get(epoch))
        steps = zip(self._slices, selections, strict=True)
        for part, selection in islice(steps, skip * self._division.micro_batches, None):
            yield part, map_tensors(self._arrays, selection.gather), selection.ids
