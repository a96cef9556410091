"""Converts frozen dataclasses to JSON values and back, strictly; replaces files at once.

Supports dataclasses, tuples, optional values, ``dict[str, ...]``, strings, numbers and booleans.
An unknown entry or a value of another type is refused, so that a file of a newer nfold is never
read in part.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

STORED_NAMES = {
    "BatchFunction.defined_at": "place",
    "BatchFunction.function_keys": "generators",
    "DataLoaderProfile.batch_size": "batch",
    "DataLoaderProfile.batches_per_epoch": "batches",
    "DataLoaderProfile.created_at": "place",
    "DataLoaderProfile.dataset_size": "samples",
    "DataLoaderProfile.host_tensors": "stay",
    "DataLoaderProfile.in_generator": "around",
    "DataLoaderProfile.length_read_ahead": "counted",
    "DataLoaderProfile.num_workers": "workers",
    "DataLoaderProfile.shards_dataset": "divides",
    "HostGapLocation.callee": "calls",
    "HostGapLocation.kind": "when",
    "HostGapLocation.location": "where",
    "LowerBound.is_complete": "whole",
    "Measurement.variant": "ablation",
    "RankSamples.caveats": "notes",
    "RankSamples.epoch_starts": "pass_starts",
    "RankSamples.host_gap_locations": "paused_at",
    "RankSamples.host_gaps_ms": "pauses_ms",
    "RankSamples.slots": "turns",
    "ReplayHints.companion_loaders": "beside",
    "ReplayHints.function_keys": "generators",
    "ReplayHints.script_sets_batch_size": "own_batches",
    "ReplayHints.slices_batches": "slices",
    "ScriptProfile.batch_function": "maker",
    "ScriptProfile.child_processes": "children",
    "ScriptProfile.companion_loaders": "beside",
    "ScriptProfile.epochs_completed": "epochs_ended",
    "ScriptProfile.fixed_batch_error": "fixed_batch",
    "ScriptProfile.gradient_exchanges": "exchanges",
    "ScriptProfile.model_calls_hooked": "followed",
    "ScriptProfile.model_samples_per_step": "through_model",
    "ScriptProfile.slices_batches": "slices",
    "ScriptProfile.source_locations": "places",
    "ScriptProfile.step_optimizer": "boundary",
    "ScriptProfile.steps_in_backward": "in_backward",
    "ScriptProfile.trace": "traced",
    "ScriptProfile.uses_join": "uneven",
    "SourceLocation.line": "where",
    "SourceLocation.package_line": "inside",
    "TraceSummary.cudnn_transpose_ms": "transposing_ms",
    "TraceSummary.device_busy_ms": "busy_ms",
    "TraceSummary.launches_per_step": "launches",
    "TraceSummary.layout_copy_ms": "reordering_ms",
    "TraceSummary.operator_layout_copy_ms": "in_operators_ms",
    "Window.epoch_gap": "between",
    "Window.first_step": "first",
    "Window.queue_drain_s": "ahead_s",
    "Window.throttle_reason": "clock_held",
}
"""Names of fields in stored JSON where they differ from ``Class.field``.

They keep files of every version readable, and the ids of measurements equal.
"""
JSON_SCHEMA_VERSION = 1  # of every JSON object that a command prints
VARIANT_KEY = "ablation"  # of a variant in stored JSON

T = TypeVar("T")


class StoredAsDict:
    """A class with a stored form of its own, also inside other values."""

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "") -> Any:
        """Return what ``to_dict`` wrote; ValueError names the first invalid entry, ``where``."""
        raise NotImplementedError


def stored_name(cls: type, field: str) -> str:
    return STORED_NAMES.get(f"{cls.__name__}.{field}", field)


def serialize(value: Any) -> Any:
    """Convert to dictionaries, lists, strings, numbers, booleans and None."""
    if isinstance(value, StoredAsDict):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls, names = type(value), [f.name for f in dataclasses.fields(value)]
        return {stored_name(cls, name): serialize(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [serialize(item) for item in value]
    if isinstance(value, dict):
        return {str(key): serialize(item) for key, item in value.items()}
    return value


def deserialize(cls: type[T], values: Any) -> T:
    """Return the ``cls`` that ``serialize`` wrote; ValueError names the first invalid entry."""
    return typing.cast(T, read_value(cls, values, cls.__name__))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def read_value(hint: Any, value: Any, where: str) -> Any:
    """Return a value of the type ``hint`` from its stored form; ``where`` names it in errors."""
    if isinstance(hint, type) and issubclass(hint, StoredAsDict):
        return hint.from_dict(_expect(dict, value, where), where)
    if dataclasses.is_dataclass(hint):
        return _read_dataclass(typing.cast(type, hint), value, where)
    origin = get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return _read_union(get_args(hint), value, where)
    if origin is tuple:
        return _read_tuple(get_args(hint), value, where)
    if origin is dict:
        entries = _expect(dict, value, where)
        return {k: read_value(get_args(hint)[1], v, f"{where}.{k}") for k, v in entries.items()}
    if origin is typing.Literal:
        if value not in get_args(hint):
            allowed = ", ".join(map(str, get_args(hint)))
            raise ValueError(f"{where}: {value!r} is not one of {allowed}")
        return value
    return _read_scalar(hint, value, where)


def _read_dataclass(cls: type, value: Any, where: str) -> Any:
    entries = _expect(dict, value, where)
    fields = {stored_name(cls, name): name for name in _hints(cls)}
    hints = {name: _hints(cls)[field] for name, field in fields.items()}
    unknown = sorted(set(entries) - set(hints))
    if unknown:
        raise ValueError(f"{where}: unknown entries {unknown}; known are {sorted(hints)}")
    try:
        return cls(
            **{fields[k]: read_value(hints[k], v, f"{where}.{k}") for k, v in entries.items()}
        )
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
            return read_value(option, value, where)
        except ValueError as error:
            failures.append(str(error))
    raise ValueError(failures[0])


def _read_tuple(items: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    entries = _expect(list, value, where)
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(read_value(items[0], v, f"{where}[{i}]") for i, v in enumerate(entries))
    if len(items) != len(entries):
        raise ValueError(f"{where}: {len(entries)} entries instead of {len(items)}")
    pairs = enumerate(zip(items, entries, strict=True))
    return tuple(read_value(item, v, f"{where}[{i}]") for i, (item, v) in pairs)


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


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield an unused path in the same folder to write to; rename it to ``path`` at the end.

    Creates the folder. Readers see the old or the new content, never a part. After an exception the
    temporary file is removed and ``path`` unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
