"""What a user trains on, behind one interface: fetch the samples of these ids as one batch.

Arrays (tensors, NumPy arrays, and tuples or dictionaries of them) are indexed whole. Map-style
data sets, lists of samples among them, are read sample by sample and collated as DataLoader does
it. Anything that can only be iterated is read in every rank, each keeping its own samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from nfold.errors import UsageError
from nfold.frameworks.torch.nested import map_tensors

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
    """The array's own memory as a tensor, or a copy's where PyTorch cannot read it as it lies."""
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
