"""Decoded arrays on disk: written atomically once, then memory-mapped by every rank.

The folder ``<name>-<digest of the source files>`` holds four ``.npy`` files (no pickles) and
``manifest.json`` with the size and SHA-256 of these files, the SHA-256 of the sources, and the
other fields of ``DataSetArrays``.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from nfold.core.errors import MachineUnfit
from nfold.data.arrays import Array, DataSetArrays
from nfold.data.files import DataSetSpec, cache_root, file_sha256, find_files, verify_files

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
MANIFEST = "manifest.json"
MAX_VERIFIED_BYTES = 2**32  # larger files are compared by size only
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

    def fill(temporary: Path) -> dict[str, Any]:
        arrays = found.format.decode(found.paths)
        for name in ARRAYS:
            np.save(temporary / f"{name}.npy", getattr(arrays, name), allow_pickle=False)
        facts = {name: getattr(arrays, name) for name in ("name", "classes", "mean", "std")}
        return {**facts, "sources": sources}

    manifest = load_folder(folder, fill, checksums=verify)
    return DataSetArrays(
        name=manifest["name"],
        classes=manifest["classes"],
        mean=tuple(manifest["mean"]),
        std=tuple(manifest["std"]),
        **{name: map_array(folder / f"{name}.npy") for name in ARRAYS},
    )


def map_array(file: Path) -> Array:
    array: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    return array


def load_folder(
    folder: Path, fill: Callable[[Path], dict[str, Any]], *, checksums: bool
) -> dict[str, Any]:
    """Return the manifest of a cache folder, which is written first if it is missing or damaged.

    ``fill`` writes the files into a temporary folder, which is then renamed, and returns further
    entries of the manifest. Keeps the folder of another process that finished first. Raises
    MachineUnfit if the cache cannot be written.
    """
    manifest = _read_manifest(folder, checksums=checksums)
    if manifest is not None:
        return manifest
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        manifest = fill(temporary)
        manifest["files"] = {
            file.name: {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
            for file in sorted(temporary.iterdir())
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _rename_into_place(temporary, folder)
    except OSError as error:
        raise MachineUnfit(
            f"the cache {folder} cannot be written: {error}; next: make room there, or set "
            "NFOLD_CACHE to another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def _read_manifest(folder: Path, *, checksums: bool) -> dict[str, Any] | None:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        for name, entry in manifest["files"].items():
            file, size = folder / name, entry["bytes"]
            compared = checksums and size <= MAX_VERIFIED_BYTES
            if file.stat().st_size != size or (compared and file_sha256(file) != entry["sha256"]):
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest


def _rename_into_place(temporary: Path, folder: Path) -> None:
    if _read_manifest(folder, checksums=True) is not None:
        return
    # A damaged folder is moved, not emptied: a process that has mapped it keeps its files.
    old = temporary.with_name(f"{temporary.name}.old")
    with suppress(FileNotFoundError):
        os.rename(folder, old)
    try:
        os.rename(temporary, folder)
    except OSError:
        if _read_manifest(folder, checksums=False) is None:
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
