"""Sequences of different lengths as batches of few lengths, so that few shapes exist."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import default_collate

from nfold.core.errors import UsageError
from nfold.engines.torch.nested_tensors import with_items
from nfold.engines.torch.run.datasets import as_arrays

# The name or the position of a part of a batch to its padding value; None: not padded.
PaddingValues = Mapping[str | int, int | None]
PADDING_VALUES: PaddingValues = {
    "input_ids": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "labels": -100,  # ignored by cross_entropy
}


@dataclass(frozen=True)
class PaddingCollate:
    """Makes a batch whose integer tensors [n, length] have a multiple of ``multiple`` as length.

    Without a ``collate`` of the user, samples may differ in length: each part that is a list, array
    or tensor of integers [length] is padded at its end to the longest of the batch.
    """

    collate: Callable[[list[Any]], Any]
    multiple: int
    values: PaddingValues

    def __call__(self, samples: list[Any]) -> Any:
        if self.collate is default_collate:
            samples = self._pad_samples(samples)
        return self.pad_batch(self.collate(samples))

    def pad_batch(self, batch: Any) -> Any:
        parts = _parts(batch)
        for name, part in parts.items():
            if isinstance(part, Tensor) and part.dim() == 2 and _is_integer(part):
                parts[name] = self._pad(name, part, part.shape[1])
        return _with_parts(batch, parts)

    def _pad_samples(self, samples: list[Any]) -> list[Any]:
        divided = [_parts(sample) for sample in samples]
        for name in divided[0]:
            sequences = [_as_sequence(parts[name]) for parts in divided]
            longest = max(-1 if each is None else len(each) for each in sequences)
            for parts, each in zip(divided, sequences, strict=True):
                if each is not None:
                    parts[name] = self._pad(name, each, longest)
        return [_with_parts(sample, parts) for sample, parts in zip(samples, divided, strict=True)]

    def _pad(self, name: str | int, tensor: Tensor, length: int) -> Tensor:
        if name not in self.values:
            raise UsageError(
                f"pad_to needs the padding value of {name!r}; next: run.loader(..., "
                f"padding={{{name!r}: 0}}), or None for a tensor that is not padded"
            )
        value = self.values[name]
        missing = -(-length // self.multiple) * self.multiple - tensor.shape[-1]
        if value is None or not missing:
            return tensor
        return functional.pad(tensor, (0, missing), value=value)


def apply_padding(
    data: Any,
    collate: Callable[[list[Any]], Any] | None,
    pad_to: int | None,
    padding: PaddingValues | None,
) -> tuple[Any, Callable[[list[Any]], Any] | None]:
    """Return data and collate of a loader whose batches are padded; arrays are padded at once.

    Raises UsageError if ``pad_to`` or a padding value is no whole number, or an array has no value.
    """
    if pad_to is None:
        if padding is not None:
            raise UsageError("padding needs pad_to; next: run.loader(..., pad_to=64)")
        return data, collate
    if not isinstance(pad_to, Integral) or isinstance(pad_to, bool) or pad_to < 1:
        raise UsageError(
            f"pad_to {pad_to!r}: allowed are whole numbers from 1; lengths become multiples of it"
        )
    padding = {} if padding is None else padding
    is_mapping = isinstance(padding, Mapping)
    if not is_mapping or not all(isinstance(v, Integral | None) for v in padding.values()):
        raise UsageError(
            f"padding {padding!r}: allowed is a dictionary of names and whole numbers, such as "
            '{"input_ids": 0, "labels": -100}'
        )
    values = {**PADDING_VALUES, **padding}
    padded = PaddingCollate(collate or default_collate, int(pad_to), values)
    arrays = as_arrays(data) if padded.collate is default_collate else None
    return (data, padded) if arrays is None else (padded.pad_batch(arrays), collate)


def _parts(value: Any) -> dict[Any, Any]:
    """The parts of a sample or a batch by name or position; a single part has position 0."""
    if isinstance(value, dict | UserDict):
        return dict(value)
    return dict(enumerate(value)) if _has_parts(value) else {0: value}


def _with_parts(value: Any, parts: dict[Any, Any]) -> Any:
    return with_items(value, parts.values()) if _has_parts(value) else parts[0]


def _has_parts(value: Any) -> bool:
    is_list = type(value) is list and _as_sequence(value) is None
    return is_list or isinstance(value, tuple | dict | UserDict)


def _as_sequence(value: Any) -> Tensor | None:
    """The integers [length] of a sample's part, None if it is something else."""
    if isinstance(value, list) and all(isinstance(each, int) for each in value):
        return torch.tensor(value, dtype=torch.int64)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iub":
        return torch.from_numpy(value if value.dtype.kind == "b" else value.astype(np.int64))
    if isinstance(value, Tensor) and value.dim() == 1 and _is_integer(value):
        return value
    return None


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
