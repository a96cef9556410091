"""Frozen dataclasses to plain JSON values and back, strictly.

Only what the nouns need: dataclasses, tuples, optional values, ``dict[str, ...]``, strings,
numbers, booleans. An unknown entry or a value of another type is refused, so that a file
written by a newer nfold is never half understood.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar, get_args, get_origin

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """``value`` as dictionaries, lists, strings, numbers, booleans and None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    return value


def from_plain(cls: type[T], values: Any) -> T:
    """The dataclass ``cls`` that ``to_plain`` wrote; ValueError names the first wrong entry."""
    return typing.cast(T, _read(cls, values, cls.__name__))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _read(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _read_dataclass(typing.cast(type, hint), value, where)
    origin = get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return _read_union(get_args(hint), value, where)
    if origin is tuple:
        return _read_tuple(get_args(hint), value, where)
    if origin is dict:
        entries = _expect(dict, value, where)
        return {k: _read(get_args(hint)[1], v, f"{where}.{k}") for k, v in entries.items()}
    if origin is typing.Literal:
        return _read_literal(get_args(hint), value, where)
    return _read_scalar(hint, value, where)


def _read_dataclass(cls: type, value: Any, where: str) -> Any:
    entries = _expect(dict, value, where)
    hints = _hints(cls)
    unknown = sorted(set(entries) - set(hints))
    if unknown:
        raise ValueError(f"{where}: unknown entries {unknown}; known are {sorted(hints)}")
    try:
        return cls(**{k: _read(hints[k], v, f"{where}.{k}") for k, v in entries.items()})
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _read_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in options:
        return None
    failures = []
    for option in options:
        if option is types.NoneType:
            continue
        try:
            return _read(option, value, where)
        except ValueError as error:
            failures.append(str(error))
    raise ValueError(failures[0])


def _read_tuple(items: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    entries = _expect(list, value, where)
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_read(items[0], v, f"{where}[{i}]") for i, v in enumerate(entries))
    if len(items) != len(entries):
        raise ValueError(f"{where}: {len(entries)} entries instead of {len(items)}")
    pairs = enumerate(zip(items, entries, strict=True))
    return tuple(_read(item, v, f"{where}[{i}]") for i, (item, v) in pairs)


def _read_literal(allowed: tuple[Any, ...], value: Any, where: str) -> Any:
    if value not in allowed:
        raise ValueError(f"{where}: {value!r} is not one of {', '.join(map(str, allowed))}")
    return value


def _read_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any or hint is object:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, bool):
        raise ValueError(f"{where}: {value!r} is not of type int")
    return _expect(hint, value, where)


def _expect(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where}: {value!r} is not of type {kind.__name__}")
    return value
