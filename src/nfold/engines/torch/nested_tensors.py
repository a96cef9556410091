"""Values of any form, with tensors inside tuples, lists and dictionaries."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed; what holds no tensor is left as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        data, batch_sizes, *orders = value  # sizes are the host's, wherever the data are
        return type(value)(change(data), batch_sizes, *(map_tensors(o, change) for o in orders))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict | UserDict):
        own = copy.copy(value)
        for name, item in value.items():
            own[name] = map_tensors(item, change)
        return own
    return value


@dataclass(frozen=True)
class TensorTree:
    """A nested value with its tensors taken out; equal where only the tensors differ.

    ``kind`` is what holds the ``parts``: a type, or a dictionary's names. A leaf has no parts:
    its kind is TENSOR, or the value itself.
    """

    kind: Hashable
    children: tuple[TensorTree, ...] | None = None

    def fill(self, tensors: Iterator[Tensor]) -> Any:
        """The value with these tensors in the places of its own."""
        if self.children is None:
            return next(tensors) if self.kind is TENSOR else cast(ConstantLeaf, self.kind).value
        items = [part.fill(tensors) for part in self.children]
        if isinstance(self.kind, DictKeys):
            return dict(zip(self.kind.keys, items, strict=True))
        kind = cast(Any, self.kind)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)


@dataclass(frozen=True)
class DictKeys:
    """The names of a dictionary, in order."""

    keys: tuple[Hashable, ...]


@dataclass(frozen=True)
class ConstantLeaf:
    """A value that is no tensor: plain ones are compared, all others are themselves alone."""

    value: Any = field(compare=False)

    def _key(self) -> Hashable:
        plain = isinstance(self.value, int | float | str | bytes | type(None))
        return (type(self.value), self.value) if plain else id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConstantLeaf) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


TENSOR = "a tensor"


def flatten_tensors(value: Any) -> tuple[tuple[Tensor, ...], TensorTree]:
    """The tensors of a nested value, in order, and what is left without them."""
    tensors: list[Tensor] = []
    form = _tensor_tree(value, tensors)
    return tuple(tensors), form


def _tensor_tree(value: Any, tensors: list[Tensor]) -> TensorTree:
    if isinstance(value, Tensor):
        tensors.append(value)
        return TensorTree(TENSOR)
    if type(value) is dict:
        return TensorTree(
            DictKeys(tuple(value)), tuple(_tensor_tree(item, tensors) for item in value.values())
        )
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return TensorTree(
            cast(Hashable, type(value)), tuple(_tensor_tree(item, tensors) for item in value)
        )
    return TensorTree(ConstantLeaf(value))
