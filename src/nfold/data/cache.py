"""Decoded arrays on disk: written once, whole or not at all, then memory-mapped by every rank.

A folder a data set and source digest, ``<name>-<digest>``, with four ``.npy`` files (never
pickles) and ``manifest.json``: the sizes and SHA-256 of the arrays and what else they need.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from nfold.data.arrays import Arrays
from nfold.data.forms import DataSet, cache_root, find, sha256
from nfold.errors import MachineUnfit

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
MANIFEST = "manifest.json"


def load(data_set: DataSet, *, verify: bool) -> Arrays:
    """The data set's arrays; with ``verify`` the cached arrays' checksums are tested first.

    A cache that is damaged is thrown away and made again from the verified sources.
    """
    found = find(data_set)
    folder = cache_root() / f"{data_set.name}-{found.digest[:16]}"
    if not (folder / MANIFEST).exists() or (verify and not _is_whole(folder)):
        _write(found.form.decode(found.paths), folder)
    return _read(folder)


def _is_whole(folder: Path) -> bool:
    expected = json.loads((folder / MANIFEST).read_text())["sha256"]
    files = {name: folder / f"{name}.npy" for name in ARRAYS}
    return all(f.exists() and sha256(f) == expected[name] for name, f in files.items())


def _write(arrays: Arrays, folder: Path) -> None:
    """Write beside, then rename; where another process was first, its folder stands."""
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        aside.mkdir(parents=True)
        for name in ARRAYS:
            np.save(aside / f"{name}.npy", getattr(arrays, name), allow_pickle=False)
        (aside / MANIFEST).write_text(json.dumps(_manifest(arrays, aside)))
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.rename(aside, folder)
    except OSError as error:
        if not (folder / MANIFEST).exists():
            raise MachineUnfit(
                f"the cache {folder} cannot be written: {error}; next: NFOLD_CACHE=FOLDER"
            ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _manifest(arrays: Arrays, folder: Path) -> dict[str, Any]:
    return {
        "name": arrays.name,
        "classes": arrays.classes,
        "mean": list(arrays.mean),
        "std": list(arrays.std),
        "sha256": {name: sha256(folder / f"{name}.npy") for name in ARRAYS},
    }


def _read(folder: Path) -> Arrays:
    said = json.loads((folder / MANIFEST).read_text())
    mapped = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS
    }
    return Arrays(
        name=said["name"],
        classes=said["classes"],
        mean=tuple(said["mean"]),
        std=tuple(said["std"]),
        **mapped,
    )
