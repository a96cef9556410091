"""Decoded arrays on disk: written once, whole or not at all, then memory-mapped by every rank.

A folder a data set and its sources' digests, ``<name>-<digest>``, with four ``.npy`` files (never
pickles) and ``manifest.json``: size and SHA-256 of the arrays, SHA-256 of the sources, and what
else ``Arrays`` holds.
"""

from __future__ import annotations

import hashlib
import json
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
FORMAT_VERSION = 1
"""Part of every cache folder's name; one more whenever decoding gives other arrays."""


def load(data_set: DataSetSpec, *, verify: bool) -> DataSetArrays:
    """The data set's arrays; with ``verify`` the cached arrays' checksums are tested first.

    A cache that is damaged is thrown away and made again from the verified sources.
    """
    found = find_files(data_set)
    sources = verify_files(found)
    folder = cache_root() / f"{data_set.name}-{_key(found.format.description, sources)}"
    manifest = read_manifest(folder, checksums=verify)
    if manifest is None:
        _write(found.format.decode(found.paths), sources, folder)
        manifest = json.loads((folder / MANIFEST).read_text())
    return _map_arrays(folder, manifest)


def _key(form: str, sources: Mapping[str, str]) -> str:
    said = json.dumps([FORMAT_VERSION, form, sorted(sources.items())])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def read_manifest(folder: Path, *, checksums: bool) -> dict[str, Any] | None:
    """The manifest of a whole cache folder; None where there is none, or it is damaged.

    Sizes are always compared, the arrays' SHA-256 with ``checksums``.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        for name in ARRAYS:
            file, said = folder / f"{name}.npy", manifest["arrays"][name]
            if file.stat().st_size != said["bytes"]:
                return None
            if checksums and file_sha256(file) != said["sha256"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest


def _write(arrays: DataSetArrays, sources: Mapping[str, str], folder: Path) -> None:
    def fill(aside: Path) -> None:
        for name in ARRAYS:
            np.save(aside / f"{name}.npy", getattr(arrays, name), allow_pickle=False)
        (aside / MANIFEST).write_text(json.dumps(_manifest(arrays, sources, aside), indent=1))

    write_folder(folder, fill, _is_complete)


def _is_complete(folder: Path, checksums: bool) -> bool:
    return read_manifest(folder, checksums=checksums) is not None


def _manifest(arrays: DataSetArrays, sources: Mapping[str, str], folder: Path) -> dict[str, Any]:
    files = {name: folder / f"{name}.npy" for name in ARRAYS}
    return {
        "name": arrays.name,
        "classes": arrays.classes,
        "mean": list(arrays.mean),
        "std": list(arrays.std),
        "sources": dict(sources),
        "arrays": {
            name: {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
            for name, file in files.items()
        },
    }


def _map_arrays(folder: Path, manifest: Mapping[str, Any]) -> DataSetArrays:
    mapped = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS
    }
    return DataSetArrays(
        name=manifest["name"],
        classes=manifest["classes"],
        mean=tuple(manifest["mean"]),
        std=tuple(manifest["std"]),
        **mapped,
    )


CompletenessCheck = Callable[[Path, bool], bool]
"""Whether a folder is there and whole; checksums are tested too where the second says so."""


def write_folder(
    folder: Path, fill: Callable[[Path], None], is_complete: CompletenessCheck
) -> None:
    """Let ``fill`` write a folder's files; where another process was first, its folder stands.

    Raises MachineUnfit where the cache cannot be written.
    """
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        aside.mkdir(parents=True)
        fill(aside)
        _rename_into_place(aside, folder, is_complete)
    except OSError as error:
        raise MachineUnfit(
            f"the cache {folder} cannot be written: {error}; next: make room there, or "
            "NFOLD_CACHE=FOLDER"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _rename_into_place(temporary: Path, folder: Path, is_complete: CompletenessCheck) -> None:
    """Rename ``aside`` to ``folder``; a damaged one that is in the way is moved off first.

    Moved, not emptied in place: a process that has it mapped keeps its files.
    """
    if is_complete(folder, True):
        return
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
