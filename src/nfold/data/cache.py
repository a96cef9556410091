"""Decoded arrays on disk: written once, whole or not at all, then memory-mapped by every rank.

A folder a data set and its sources' digests, ``<name>-<digest>``, with four ``.npy`` files (never
pickles) and ``manifest.json``: size and SHA-256 of the arrays, SHA-256 of the sources, and what
else ``Arrays`` holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nfold.data.arrays import DataSetArrays
from nfold.data.find import cache_root, find_files
from nfold.data.forms import DataSetSpec
from nfold.data.place import write_folder
from nfold.data.verify import file_sha256, verify_files

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
    """Put the arrays and what they were made of into the cache."""

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
