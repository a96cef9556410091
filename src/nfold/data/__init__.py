"""Data sets by name: found, verified, decoded once into a cache, then memory-mapped.

Each data set's module defines ``DATA_SET``: its formats in order of preference, the files of each
format with their SHA-256, and the decoder.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nfold.core.errors import DataMissing, UnknownValue

if TYPE_CHECKING:
    from nfold.data.arrays import DataSetArrays
    from nfold.data.files import DataSetSpec
    from nfold.data.photographs import PhotographSet

DATA_SETS = ("digits", "mnist", "cifar10")  # each in the module of its name


def prepare(name: str, folder: Path | None = None) -> None:
    """Find, verify and decode a data set, so that ranks only need to map the cache.

    ``folder`` is searched first, here and in child processes (it is stored in NFOLD_DATA).
    Downloads missing files if NFOLD_DOWNLOAD=1. Raises DataMissing, DataCorrupt, ExtraMissing, or
    MachineUnfit if a folder cannot be read or written.
    """
    from nfold.data import cache, files

    _set_data_folder(folder)
    data_set = _data_set(name)
    try:
        cache.load(data_set, verify=True)
    except DataMissing:
        if not (data_set.downloads and files.downloads_allowed()):
            raise
        files.download_data_set(data_set)
        cache.load(data_set, verify=True)


def prepare_photographs(
    folder: Path | None, *, samples: int, classes: int, skip_bad: bool, decode: bool
) -> PhotographSet:
    """Find, check and pack photographs, so that ranks only need to map them.

    With ``decode`` the decoded pixels are cached as well. Raises DataMissing, DataCorrupt,
    ExtraMissing or MachineUnfit.
    """
    from nfold.data import photographs

    _set_data_folder(folder)
    photos = photographs.load(verify=True).validate(classes=classes, skip_bad=skip_bad)
    return photos.with_decoded_images(samples) if decode else photos


def photograph_count() -> int:
    from nfold.data import photographs

    return len(photographs.load().train)


def load(name: str) -> DataSetArrays:
    """Memory-map a data set from the cache; decodes it into the cache first if necessary."""
    from nfold.data import cache

    return cache.load(_data_set(name), verify=False)


def _set_data_folder(folder: Path | None) -> None:
    if folder is not None:
        os.environ["NFOLD_DATA"] = str(folder.resolve())


def _data_set(name: str) -> DataSetSpec:
    if name not in DATA_SETS:
        raise UnknownValue("data set", name, DATA_SETS)
    data_set: DataSetSpec = importlib.import_module(f"nfold.data.{name}").DATA_SET
    return data_set
