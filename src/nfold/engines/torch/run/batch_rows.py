"""The rows of a batch: parts of a step's arguments, and one result of those of the parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from nfold.core.errors import UsageError
from nfold.engines.torch.nested_tensors import collect_tensors

ROWS_ADVICE = (
    'memory "fit" divides a batch of {rows} samples, but no argument of {name} has {rows} rows; '
    "next: pass the batch of run.loader to it, or memory='fixed' with accumulate=2"
)


def select_rows(value: Any, rows: int, part: range, name: str) -> Any:
    """Return the arguments of function ``name`` with the rows ``part`` of a batch of ``rows``.

    Tensors, arrays and lists with one item per sample are cut; other values stay as they are.
    Raises UsageError if none is.
    """
    found = _Rows(rows, part)
    selected = found.select(value)
    if not found.count:
        raise UsageError(ROWS_ADVICE.format(rows=rows, name=name))
    return selected


class _Rows:
    def __init__(self, rows: int, part: range) -> None:
        self.count = 0
        self._rows, self._slice = rows, slice(part.start, part.stop)

    def select(self, value: Any) -> Any:
        if isinstance(value, PackedSequence):
            raise UsageError(
                'memory "fit" cannot divide a PackedSequence; next: pack it inside the function'
            )
        if isinstance(value, Tensor | np.ndarray):
            return self._cut(value) if value.ndim and len(value) == self._rows else value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.select, value))
        if type(value) is list and len(value) == self._rows and not collect_tensors(value):
            return self._cut(value)
        if type(value) in (list, tuple):
            return type(value)(map(self.select, value))
        if hasattr(value, "items") and hasattr(
            value, "copy"
        ):  # also a UserDict, such as BatchEncoding
            own = value.copy()
            for key, item in value.items():
                own[key] = self.select(item)
            return own
        return value

    def _cut(self, value: Any) -> Any:
        self.count += 1
        return value[self._slice]


def merge_results(values: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return one result for the parts of a batch that have so many ``rows``.

    A floating-point scalar is a mean over samples, another number is a count, and tensors with a
    row per sample are concatenated, also in tuples, lists and dictionaries. Other values are those
    of the last part.
    """
    first, last = values[0], values[-1]
    if len(values) == 1 or any(type(value) is not type(first) for value in values):
        return last
    if isinstance(first, dict) and all(value.keys() == first.keys() for value in values):
        return {key: merge_results([value[key] for value in values], rows) for key in first}
    if isinstance(first, tuple | list) and len({len(value) for value in values}) == 1:
        items = [merge_results(column, rows) for column in zip(*values, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if isinstance(first, Tensor) and first.dim():
        has_rows = all(len(value) == n for value, n in zip(values, rows, strict=True))
        return torch.cat(list(values)) if has_rows else last
    if isinstance(first, float) or (isinstance(first, Tensor) and first.is_floating_point()):
        return sum(value * (n / sum(rows)) for value, n in zip(values, rows, strict=True))
    if isinstance(first, int | Tensor) and not isinstance(first, bool):
        return sum(values)
    return last
