"""Decoded arrays on disk: written atomically once, then memory-mapped by every rank.

The folder ``<name>-<digest of the source files>`` holds four ``.npy`` files (no pickles) and
``manifest.json`` with the size and SHA-256 of the arrays, the SHA-256 of the sources, and the other
fields of ``DataSetArrays``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from nfold.core.errors import MachineUnfit
from nfold.data.arrays import DataSetArrays
from nfold.data.files import DataSetSpec, cache_root, file_sha256, find_files, verify_files

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
MANIFEST = "manifest.json"
FORMAT_VERSION = 1  # part of the folder's name; increase it if decoding gives other arrays


def load(data_set: DataSetSpec, *, verify: bool) -> DataSetArrays:
    """Return the data set's arrays; with ``verify`` the cached checksums are compared first.

    Decodes the verified source files again if the cache is missing or damaged.
    """
    found = find_files(data_set)
    sources = verify_files(found)
    key = json.dumps([FORMAT_VERSION, found.format.description, sorted(sources.items())])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = cache_root() / f"{data_set.name}-{digest}"
    manifest = read_manifest(folder, checksums=verify)
    if manifest is None:
        _write(found.format.decode(found.paths), sources, folder)
        manifest = json.loads((folder / MANIFEST).read_text())
    return DataSetArrays(
        name=manifest["name"],
        classes=manifest["classes"],
        mean=tuple(manifest["mean"]),
        std=tuple(manifest["std"]),
        **{
            name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in ARRAYS
        },
    )


def read_manifest(folder: Path, *, checksums: bool) -> dict[str, Any] | None:
    """Return the manifest of a complete cache folder; None if it is missing or damaged.

    Always compares sizes; compares the SHA-256 of the arrays with ``checksums``.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        entries = {f"{name}.npy": manifest["arrays"][name] for name in ARRAYS}
        return manifest if files_match(folder, entries, checksums=checksums) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def files_match(
    folder: Path, entries: Mapping[str, Any], *, checksums: bool, limit_bytes: float = math.inf
) -> bool:
    """Whether each file has the size and SHA-256 of its entry, as ``file_entry`` returns it.

    Files over ``limit_bytes`` are compared by size only. Raises OSError for a missing file.
    """
    for name, entry in entries.items():
        file = folder / name
        if file.stat().st_size != entry["bytes"]:
            return False
        if checksums and entry["bytes"] <= limit_bytes and file_sha256(file) != entry["sha256"]:
            return False
    return True


def file_entry(file: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file, for a manifest."""
    return {"bytes": file.stat().st_size, "sha256": file_sha256(file)}


def _write(arrays: DataSetArrays, sources: Mapping[str, str], folder: Path) -> None:
    def fill(temporary: Path) -> None:
        for name in ARRAYS:
            np.save(temporary / f"{name}.npy", getattr(arrays, name), allow_pickle=False)
        manifest = {
            "name": arrays.name,
            "classes": arrays.classes,
            "mean": list(arrays.mean),
            "std": list(arrays.std),
            "sources": dict(sources),
            "arrays": {name: file_entry(temporary / f"{name}.npy") for name in ARRAYS},
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))

    def is_complete(folder: Path, checksums: bool) -> bool:
        return read_manifest(folder, checksums=checksums) is not None

    write_folder(folder, fill, is_complete)


# Takes (folder, compare checksums); False for a missing or damaged folder
CompletenessCheck = Callable[[Path, bool], bool]


def write_folder(
    folder: Path, fill: Callable[[Path], None], is_complete: CompletenessCheck
) -> None:
    """Write a cache folder atomically; ``fill`` writes its files into a temporary folder.

    Keeps the folder of another process that finished first. Raises MachineUnfit if the cache
    cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        fill(temporary)
        _rename_into_place(temporary, folder, is_complete)
    except OSError as error:
        raise MachineUnfit(
            f"the cache {folder} cannot be written: {error}; next: make room there, or set "
            "NFOLD_CACHE to another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename_into_place(temporary: Path, folder: Path, is_complete: CompletenessCheck) -> None:
    if is_complete(folder, True):
        return
    # A damaged folder is moved, not emptied: a process that has mapped it keeps its files.
    old = temporary.with_name(f"{temporary.name}.old")
    with suppress(FileNotFoundError):
        os.rename(folder, old)
    try:
        os.rename(temporary, folder)
    except OSError:
        if not is_complete(folder, False):
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
