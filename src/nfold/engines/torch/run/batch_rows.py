"""The rows of a batch: parts of a step's arguments, and one result of those of the parts."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from nfold.core.errors import UsageError
from nfold.engines.torch.nested_tensors import with_items

ROWS_ADVICE = (
    'memory "fit" divides a batch of {rows} samples, but no argument of {name} has {rows} rows; '
    "next: pass the batch of run.loader to it, or memory='fixed' with accumulate=2"
)
AMBIGUOUS = (
    'memory "fit" cannot tell whether a list of {rows} tensors of {rows} rows is one sample per item '
    "or one batch per item; next: pass the tensors as separate arguments"
)
Path = tuple[Any, ...]


class RowSelector:
    """Selects rows of the arguments of function ``name``, whose structure is the same in every call.

    Tensors, arrays, lists and tuples with one item per sample are cut, also in dictionaries; other
    values stay as they are. A list of batches looks like a list of samples if it has as many items as
    there are samples: earlier calls decide.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._holds_samples: dict[Path, bool] = {}
        self._rows, self._slice, self._cuts = 0, slice(0), 0

    def __call__(self, args: Any, kwargs: Any, rows: int, part: range) -> tuple[Any, Any]:
        """Return the arguments with the rows ``part`` of ``rows``. Raises UsageError if none has."""
        self._rows, self._slice, self._cuts = rows, slice(part.start, part.stop), 0
        own = self._select_each(args, enumerate(args), ()), self._select(kwargs, ())
        if not self._cuts:
            raise UsageError(ROWS_ADVICE.format(rows=rows, name=self._name))
        return own

    def _select(self, value: Any, path: Path) -> Any:
        if isinstance(value, PackedSequence):
            raise UsageError(
                'memory "fit" cannot divide a PackedSequence; next: pack it inside the function'
            )
        if isinstance(value, Tensor | np.ndarray):
            return self._cut(value) if self._has_rows(value) else value
        if type(value) in (list, tuple) and self._is_list_of_samples(value, path):
            return self._cut(value)
        is_named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
        if type(value) in (list, tuple) or is_named_tuple:
            return self._select_each(value, enumerate(value), path)
        if isinstance(value, dict | UserDict):
            return self._select_each(value, value.items(), path)
        return value

    def _select_each(self, value: Any, items: Iterable[tuple[Any, Any]], path: Path) -> Any:
        return with_items(value, [self._select(item, (*path, key)) for key, item in items])

    def _is_list_of_samples(self, values: Any, path: Path) -> bool:
        batches = sum(map(self._has_rows, values))
        if len(values) != self._rows or batches == 0:
            holds_samples = len(values) == self._rows
            if batches or holds_samples:
                self._holds_samples[path] = holds_samples
            return holds_samples
        if path in self._holds_samples:
            return self._holds_samples[path]
        if len({getattr(item, "ndim", None) for item in values}) == 1:
            raise UsageError(AMBIGUOUS.format(rows=self._rows))
        return False

    def _has_rows(self, value: Any) -> bool:
        is_array = isinstance(value, Tensor | np.ndarray)
        return is_array and value.ndim > 0 and len(value) == self._rows

    def _cut(self, value: Any) -> Any:
        self._cuts += 1
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
        return with_items(first, items)
    if isinstance(first, Tensor) and first.dim():
        has_rows = all(len(value) == n for value, n in zip(values, rows, strict=True))
        return torch.cat(list(values)) if has_rows else last
    if isinstance(first, float) or (isinstance(first, Tensor) and first.is_floating_point()):
        return sum(value * (n / sum(rows)) for value, n in zip(values, rows, strict=True))
    if isinstance(first, int | Tensor) and not isinstance(first, bool):
        return sum(values)
    return last
