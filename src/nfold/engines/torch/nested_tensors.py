"""Tensors inside tuples, lists, dictionaries and data sets."""

from __future__ import annotations

import copy
import operator
import weakref
from collections import UserDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import TensorDataset


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same structure with every tensor changed.

    Values in which no tensor becomes another one are returned themselves: a function may add to a
    list or a dictionary that its caller reads afterwards.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        data, batch_sizes, *orders = value  # sizes stay on the host
        return type(value)(change(data), batch_sizes, *(map_tensors(o, change) for o in orders))
    if type(value) in (list, tuple) or _is_named_tuple(value):
        items = [map_tensors(item, change) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return with_items(value, items)
    if isinstance(value, dict | UserDict):
        items = [map_tensors(item, change) for item in value.values()]
        return value if all(map(operator.is_, items, value.values())) else with_items(value, items)
    return value


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def with_items(value: Any, items: Iterable[Any]) -> Any:
    """Return a list, tuple or dictionary of the same class with other items in the same order.

    The items of a dictionary are replaced also where they are attributes.
    """
    if isinstance(value, list | tuple):
        return type(value)(*items) if _is_named_tuple(value) else type(value)(items)
    if type(value) is dict:  # torch.compile knows no copy.copy
        return dict(zip(value, items, strict=True))
    own = copy.copy(value)
    attributes = getattr(own, "__dict__", {})
    for (name, before), item in zip(value.items(), items, strict=True):
        own[name] = item
        if name in attributes and attributes[name] is before:
            attributes[name] = item
    return own


def collect_tensors(value: Any) -> list[Tensor]:
    """Return the tensors that ``map_tensors`` would change, in order."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(value, collect)
    return tensors


@dataclass(frozen=True)
class TensorTree:
    """A nested value without its tensors; equal for values that differ only in their tensors.

    ``kind`` is a type, or a DictionaryKind. A leaf has no children: its kind is TENSOR, or a
    ConstantLeaf.
    """

    kind: Hashable
    children: tuple[TensorTree, ...] | None = None

    def fill(self, tensors: Iterator[Tensor]) -> Any:
        if self.children is None:
            return next(tensors) if self.kind is TENSOR else cast(ConstantLeaf, self.kind).value
        items = [part.fill(tensors) for part in self.children]
        if isinstance(self.kind, DictionaryKind):
            return with_items(self.kind.empty, items)
        kind = cast(Any, self.kind)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)


@dataclass(frozen=True)
class DictionaryKind:
    """The class and the keys of a dictionary; ``empty`` is one with these keys and no values."""

    kind: type
    keys: tuple[Hashable, ...]
    empty: Any = field(compare=False)


class ConstantLeaf:
    """A value that is no tensor: numbers and texts are compared, others by identity.

    Keeps no object alive: trees are keys, and an object may be a batch.
    """

    def __init__(self, value: Any) -> None:
        self._is_plain = isinstance(value, int | float | str | bytes | type(None))
        self._key: Hashable = (type(value), value) if self._is_plain else id(value)
        self._reference: Callable[[], Any]
        try:
            self._reference = weakref.ref(value)
        except TypeError:
            self._reference = lambda: value

    @property
    def value(self) -> Any:
        """The value; None for an object that no longer exists."""
        return self._reference()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConstantLeaf) or self._key != other._key:
            return False
        return self._is_plain or self.value is other.value

    def __hash__(self) -> int:
        return hash(self._key)


TENSOR = "a tensor"


def flatten_tensors(value: Any) -> tuple[tuple[Tensor, ...], TensorTree]:
    """Return the tensors of a nested value, and the value without them.

    The tensors of other objects stay in the tree, also those of a PackedSequence, whose sizes on
    the host decide what a GPU computes.
    """
    tensors: list[Tensor] = []
    tree = _tensor_tree(value, tensors)
    return tuple(tensors), tree


def _tensor_tree(value: Any, tensors: list[Tensor]) -> TensorTree:
    if isinstance(value, Tensor):
        tensors.append(value)
        return TensorTree(TENSOR)
    if isinstance(value, dict | UserDict):
        kind = DictionaryKind(type(value), tuple(value), with_items(value, [None] * len(value)))
        return TensorTree(kind, tuple(_tensor_tree(item, tensors) for item in value.values()))
    is_sequence = type(value) in (list, tuple) or _is_named_tuple(value)
    if is_sequence and not isinstance(value, PackedSequence):
        return TensorTree(
            cast(Hashable, type(value)), tuple(_tensor_tree(item, tensors) for item in value)
        )
    return TensorTree(ConstantLeaf(value))


def yields_rows(data: Any) -> bool:
    """Return whether samples are the rows of a TensorDataset, which does not process them."""
    own = isinstance(data, TensorDataset)
    return own and type(data).__getitem__ is TensorDataset.__getitem__
