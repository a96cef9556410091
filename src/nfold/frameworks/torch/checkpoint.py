"""Checkpoints: everything that training depends on, written aside and renamed.

A checkpoint is a folder ``step-N``: tensors as safetensors, everything else as JSON; nothing in
it is a pickle. It is written under another name, flushed to the disk and then renamed, so that
a folder with the right name is whole, and the one before it stays until then.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nfold.errors import DataCorrupt, UsageError
from nfold.frameworks.checkpoints import REPLACED_SUFFIX, sorted_checkpoints

FORMAT = 1
SEPARATOR = "/"


def begin_checkpoint(staging: Path) -> None:
    """Make the empty folder that a checkpoint is written to; what a killed run left goes."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)


def write_part(staging: Path, name: str, values: Mapping[str, Any]) -> None:
    """Write nested ``values``: their tensors to NAME.safetensors, the rest to NAME.json."""
    tensors: dict[str, Tensor] = {}
    rest = _without_tensors(values, "", tensors)
    copies = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    save_file(copies, staging / f"{name}.safetensors")
    try:
        text = json.dumps(rest)
    except TypeError as error:
        raise UsageError(
            f"the state of {name} cannot be kept in a checkpoint ({error}); allowed are tensors, "
            "numbers, texts, lists and dictionaries"
        ) from None
    (staging / f"{name}.json").write_text(text)


def read_part(folder: Path, name: str) -> Any:
    """What ``write_part`` wrote, tensors on the CPU; DataCorrupt names an unreadable file."""
    try:
        tensors = load_file(folder / f"{name}.safetensors")
        rest = json.loads((folder / f"{name}.json").read_text())
    except FileNotFoundError:
        raise
    except Exception as error:
        raise DataCorrupt(f"{folder / name}: the checkpoint cannot be read ({error})") from None
    return _with_tensors(rest, tensors)


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for ``value``; tensors are moved to ``tensors`` under their path."""
    if isinstance(value, Tensor):
        while path in tensors:  # two keys of which one has the separator in it, or is a number
            path += SEPARATOR
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        keys = [
            [_check_key(key), _without_tensors(value[key], f"{path}{SEPARATOR}{key}", tensors)]
            for key in value
        ]
        return {"mapping": keys}
    if isinstance(value, list | tuple):
        return [
            _without_tensors(item, f"{path}{SEPARATOR}{number}", tensors)
            for number, item in enumerate(value)
        ]
    return value


def _check_key(key: Any) -> Any:
    if not isinstance(key, str | int):
        raise UsageError(f"a state's key {key!r}: allowed are texts and whole numbers")
    return key


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {key: _with_tensors(item, tensors) for key, item in value["mapping"]}
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    return value


def commit_checkpoint(staging: Path, final: Path, keep: int) -> None:
    """Flush ``aside`` to the disk, give it its name, and remove all but the ``keep`` newest."""
    for file in staging.iterdir():
        _fsync(file)
    _fsync(staging)
    before = final.with_name(f"{final.name}{REPLACED_SUFFIX}")
    if final.exists():
        final.rename(before)
    staging.rename(final)
    _fsync(final.parent)
    shutil.rmtree(before, ignore_errors=True)
    for path in sorted_checkpoints(final.parent)[:-keep]:
        shutil.rmtree(path)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def get_random_state() -> dict[str, Any]:
    """The states of PyTorch's generators on this rank, which dropout draws from."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Draw on from ``state``."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
