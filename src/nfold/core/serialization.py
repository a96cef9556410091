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

STORED_NAMES: dict[str, dict[str, str]] = {
    "BatchFunction": {
        "defined_at": "place",
        "generator_functions": "generators",
    },
    "DataLoaderProfile": {
        "batch_size": "batch",
        "batches_per_epoch": "batches",
        "created_at": "place",
        "cycled": "around",
        "dataset_size": "samples",
        "host_tensors": "stay",
        "length_read_ahead": "counted",
        "num_workers": "workers",
        "shards_dataset": "divides",
    },
    "HostGapLocation": {
        "callee": "calls",
        "kind": "when",
        "location": "where",
    },
    "JournalEntry": {
        "backup": "kept",
        "kind": "was",
    },
    "LowerBound": {
        "is_complete": "whole",
    },
    "Measurement": {
        "variant": "ablation",
    },
    "RankSamples": {
        "caveats": "notes",
        "epoch_starts": "pass_starts",
        "host_gap_locations": "paused_at",
        "host_gaps_ms": "pauses_ms",
        "slots": "turns",
    },
    "ReplayHints": {
        "companion_loaders": "beside",
        "generator_functions": "generators",
        "script_sets_batch_size": "own_batches",
        "slices_batches": "slices",
    },
    "ScriptProfile": {
        "batch_function": "maker",
        "child_processes": "children",
        "companion_loaders": "beside",
        "epochs_completed": "epochs_ended",
        "fixed_batch_error": "fixed_batch",
        "gradient_exchanges": "exchanges",
        "model_calls_hooked": "followed",
        "model_samples_per_step": "through_model",
        "slices_batches": "slices",
        "source_locations": "places",
        "step_optimizer": "boundary",
        "steps_in_backward": "in_backward",
        "trace": "traced",
        "uses_join": "uneven",
    },
    "SourceLocation": {
        "line": "where",
        "package_line": "inside",
    },
    "TraceSummary": {
        "cudnn_transpose_ms": "transposing_ms",
        "device_busy_ms": "busy_ms",
        "launches_per_step": "launches",
        "layout_copy_ms": "reordering_ms",
        "operator_layout_copy_ms": "in_operators_ms",
    },
    "Variant": {
        "batches_per_epoch": "pass_batches",
        "broadcast_buffers": "buffers",
        "data_shares": "shares",
        "exchange_after_backward": "late_exchange",
        "exchange_each_micro_batch": "repeated_exchange",
        "find_unused_parameters": "unused_parameters",
        "profiler_steps": "traced",
    },
    "Window": {
        "epoch_gap": "between",
        "first_step": "first",
        "queue_drain_s": "ahead_s",
        "throttle_reason": "clock_held",
    },
}
"""Names of fields in stored JSON, by class and field, where they differ. A file written by any
version stays readable, and the id of a measurement stays the same."""
T = TypeVar("T")


def stored_name(cls: type, field: str) -> str:
    """Return the name of a dataclass field in stored JSON."""
    return STORED_NAMES.get(cls.__name__, {}).get(field, field)


def serialize(value: Any) -> Any:
    """``value`` as dictionaries, lists, strings, numbers, booleans and None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls, names = type(value), [f.name for f in dataclasses.fields(value)]
        return {stored_name(cls, name): serialize(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [serialize(item) for item in value]
    if isinstance(value, dict):
        return {str(key): serialize(item) for key, item in value.items()}
    return value


def deserialize(cls: type[T], values: Any) -> T:
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
    fields = {stored_name(cls, name): name for name in _hints(cls)}
    hints = {name: _hints(cls)[field] for name, field in fields.items()}
    unknown = sorted(set(entries) - set(hints))
    if unknown:
        raise ValueError(f"{where}: unknown entries {unknown}; known are {sorted(hints)}")
    try:
        return cls(**{fields[k]: _read(hints[k], v, f"{where}.{k}") for k, v in entries.items()})
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


JSON_SCHEMA_VERSION = 1
"""Version of every JSON object that a command prints."""
