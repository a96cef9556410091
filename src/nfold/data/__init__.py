"""The data sets by name: found, verified, decoded once into a cache, then memory-mapped.

A data set's module holds one ``DATA_SET``: which forms of it exist, best first, which files each
form needs, what their SHA-256 must be, and how they are decoded.
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

DATA_SET_MODULES = {
    "digits": "nfold.data.digits",
    "mnist": "nfold.data.mnist",
    "cifar10": "nfold.data.cifar10",
}


PHOTOGRAPHS = "photographs"
"""JPEGs of a user's own: what nobody else has the checksums of."""


def prepare(name: str, folder: Path | None = None) -> None:
    """Find, verify and decode a data set, so that ranks only map it; checks the cache too.

    ``folder`` is looked into first, here and in every process that is started from now on. What
    is nowhere is downloaded, if NFOLD_DOWNLOAD=1 allows it. Raises DataMissing, DataCorrupt,
    ExtraMissing, or MachineUnfit where a folder cannot be read or written.
    """
    from nfold.data import cache, files

    if folder is not None:
        os.environ["NFOLD_DATA"] = str(folder.resolve())
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
    """Find photographs, pack and check them, so that ranks only map them.

    With ``decoded`` they are decoded as well. Raises DataMissing, DataCorrupt, ExtraMissing or
    MachineUnfit.
    """
    from nfold.data import photographs

    if folder is not None:
        os.environ["NFOLD_DATA"] = str(folder.resolve())
    found = photographs.load(verify=True).validate(classes=classes, skip_bad=skip_bad)
    return found.with_decoded_images(samples) if decode else found


def photograph_count() -> int:
    """How many there are to train on, once they are prepared."""
    from nfold.data import photographs

    return len(photographs.load().train)


def load(name: str) -> DataSetArrays:
    """A data set from the cache, memory-mapped; decoded into it first where it is not there."""
    from nfold.data import cache

    return cache.load(_data_set(name), verify=False)


def _data_set(name: str) -> DataSetSpec:
    if name not in DATA_SET_MODULES:
        raise UnknownValue("data set", name, DATA_SET_MODULES)
    found: DataSetSpec = importlib.import_module(DATA_SET_MODULES[name]).DATA_SET
    return found
