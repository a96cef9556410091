"""The user's photographs: JPEGs of any size, packed into files that every worker maps.

``NFOLD_DATA``, or its folder ``photographs``, ``imagenet`` or ``imagenet-sample``, contains a
folder per class (``train/cat/1.jpg`` or ``cat/1.jpg``) or Parquet as on Hugging Face
(``train-*.parquet`` with ``image.bytes``, ``image.path`` and ``label``).
"""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nfold.core.errors import DataCorrupt, DataMissing, MachineUnfit
from nfold.core.machine import free_memory_bytes
from nfold.core.serialization import replace_file
from nfold.data.arrays import Images, first_invalid_label
from nfold.data.files import data_roots
from nfold.data.packed_jpegs import (
    PackedJpegs,
    PhotographSource,
    find_folders,
    find_shards,
    map_jpegs,
    pack_photographs,
)

NAME = "photographs"
FOLDERS = (NAME, "imagenet", "imagenet-sample", "")
MAX_LISTED_FILES = 3  # bad images named in a message


@dataclass(frozen=True, kw_only=True, eq=False)
class PhotographSet:
    """Training photographs, and test photographs if the folder has them.

    ``bad`` are the skipped files as (name, reason); ``folder`` is the folder of the sources.
    """

    train: PackedJpegs
    test: PackedJpegs | None
    bad: tuple[tuple[str, str], ...]
    folder: Path

    @property
    def bad_files_note(self) -> str | None:
        """The number of bad files with the first names and reasons, or None."""
        if not self.bad:
            return None
        files = "; ".join(f"{name} {reason}" for name, reason in self.bad[:MAX_LISTED_FILES])
        more = ", ..." if len(self.bad) > MAX_LISTED_FILES else ""
        return f"{len(self.bad)} bad images in {self.folder}: {files}{more}"

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        return (("bad_images", self.bad_files_note),) if self.bad_files_note else ()

    def validate(self, *, classes: int, skip_bad: bool) -> PhotographSet:
        """Return self; raises DataCorrupt for bad files or labels outside 0 to ``classes`` - 1."""
        if self.bad_files_note and not skip_bad:
            raise DataCorrupt(f"{self.bad_files_note}; next: repair or remove them, or --skip-bad")
        for jpegs in (self.train, self.test):
            index = None if jpegs is None else first_invalid_label(jpegs.labels, classes)
            if jpegs is not None and index is not None:
                raise DataCorrupt(
                    f"{jpegs.name(index)} has the label {jpegs.labels[index]}, not 0 to "
                    f"{classes - 1}; next: the workload's parameter "
                    f"classes={int(jpegs.labels.max()) + 1}"
                )
        return self

    def with_decoded_images(self, samples: int) -> PhotographSet:
        """Also decode the first training images (0: all) into the cache.

        Raises MachineUnfit, with the sizes, if they do not fit into the host's memory.
        """
        return dataclasses.replace(self, train=decode_all(self.train.first(samples)))


def load(*, verify: bool = False) -> PhotographSet:
    """Load the photographs of the first search folder that has any; packs them if necessary."""
    folder, train, test = _find_sources()
    packed, bad = pack_photographs(NAME, train, test, verify=verify)
    return PhotographSet(
        train=map_jpegs(packed, "train"),
        test=map_jpegs(packed, "test") if test else None,
        bad=bad,
        folder=folder,
    )


def _find_sources() -> tuple[Path, PhotographSource, PhotographSource | None]:
    folders = [root / name for root in data_roots() for name in FOLDERS]
    for folder in folders:
        for find in (find_shards, find_folders):
            train = find(folder, ("train",))
            if train is not None:
                return folder, train, find(folder, ("validation", "val", "test"))
    for folder in folders:
        unsplit = find_folders(folder, ("",))
        if unsplit is not None:
            return folder, unsplit, None
    raise DataMissing(
        "no photographs: missing train-*.parquet with image.bytes and label, or a folder per "
        f"class with JPEGs (train/CLASS/*.jpg or CLASS/*.jpg); looked in "
        f"{', '.join(map(str, folders))}; next: set NFOLD_DATA to the folder that has them"
    )


# Decoded photographs in the cache, mapped by all workers. They must fit into the page cache:
# reading them from disk in every epoch would be slower than decoding.

MAX_FREE_MEMORY_FRACTION = 0.8


def decode_all(jpegs: PackedJpegs) -> PackedJpegs:
    """Decode all images into the cache; raises MachineUnfit if they do not fit into memory."""
    file, size_bytes = decoded_path(jpegs), int(jpegs.pixel_offsets[-1])
    if not (file.exists() and file.stat().st_size == size_bytes):
        check_fits(size_bytes, free_memory_bytes())
        _decode_to_file(jpegs, file, size_bytes)
    return map_decoded(jpegs)


def map_decoded(jpegs: PackedJpegs) -> PackedJpegs:
    return dataclasses.replace(jpegs, decoded_pixels=np.memmap(decoded_path(jpegs), np.uint8, "r"))


def decoded_path(jpegs: PackedJpegs) -> Path:
    """Return the file of the decoded images; it depends on the number of samples."""
    folder = jpegs.names.parent
    return folder.with_name(f"{folder.name}-decoded") / f"{jpegs.names.stem}-{len(jpegs)}.raw"


def check_fits(needed_bytes: int, free: int) -> None:
    """Raise MachineUnfit, with the sizes, if decoded images do not fit into memory."""
    if needed_bytes > MAX_FREE_MEMORY_FRACTION * free:
        raise MachineUnfit(
            f"decoded photographs need {needed_bytes / 2**30:.3g} GiB; allowed are "
            f"{MAX_FREE_MEMORY_FRACTION:.0%} of the host's free {free / 2**30:.3g} GiB; next: "
            "--cache off, --input loader"
        )


def _decode_to_file(jpegs: PackedJpegs, file: Path, size_bytes: int) -> None:
    try:
        with replace_file(file) as temporary:
            pixels: Images = np.memmap(temporary, np.uint8, "w+", shape=(size_bytes,))
            offsets = jpegs.pixel_offsets

            def decode(index: int) -> None:
                pixels[offsets[index] : offsets[index + 1]] = jpegs.decode(index).ravel()

            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
                for _ in threads.map(decode, range(len(jpegs))):
                    pass
    except OSError as error:
        raise MachineUnfit(
            f"{file} cannot be written: {error}; next: make room there, or --cache off"
        ) from error
