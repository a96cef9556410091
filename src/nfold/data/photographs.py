"""Photographs as JPEGs: any number, any size, packed into one file that every worker maps.

``NFOLD_DATA`` holds them, as a folder per class (``train/cat/1.jpg``, or ``cat/1.jpg``) or as
Parquet in the Hugging Face form (``train-*.parquet`` with ``image.bytes``, ``image.path`` and
``label``); in it, or in its folder ``photographs``, ``imagenet`` or ``imagenet-sample``.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nfold.core.errors import DataCorrupt, DataMissing, MachineUnfit
from nfold.core.machine import free_memory_bytes
from nfold.data.arrays import Images
from nfold.data.files import cache_root
from nfold.data.packed_jpegs import (
    PackedJpegs,
    PhotographPack,
    PhotographSource,
    find_folders,
    find_shards,
    pack_photographs,
)

NAME = "photographs"
FOLDERS = (NAME, "imagenet", "imagenet-sample", "")
MAX_LISTED_FILES = 3
"""Bad images whose names a message has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PhotographSet:
    """What is trained on, and what is evaluated on if the place has it.

    ``bad`` are files that were left out, each with the reason; ``place`` is where they all lie.
    """

    train: PackedJpegs
    test: PackedJpegs | None
    bad: tuple[tuple[str, str], ...]
    folder: Path

    @property
    def bad_files_note(self) -> str | None:
        """How many files were left out and which, or None."""
        if not self.bad:
            return None
        named = "; ".join(f"{name} {reason}" for name, reason in self.bad[:MAX_LISTED_FILES])
        more = ", ..." if len(self.bad) > MAX_LISTED_FILES else ""
        return f"{len(self.bad)} of the images in {self.folder} left out: {named}{more}"

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """The same for a measurement, as (kind, text)."""
        return (("bad_images", self.bad_files_note),) if self.bad_files_note else ()

    def validate(self, *, classes: int, skip_bad: bool) -> PhotographSet:
        """Itself; DataCorrupt where files are bad or labels are not 0 to ``classes`` - 1."""
        if self.bad_files_note and not skip_bad:
            raise DataCorrupt(f"{self.bad_files_note}; next: mend or remove them, or --skip-bad")
        for part in (self.train, self.test):
            if part is not None:
                _check_labels(part, classes)
        return self

    def with_decoded_images(self, samples: int) -> PhotographSet:
        """The same with its first training images (0: all) decoded, beside the packed ones.

        Raises MachineUnfit, with the sizes, where the host has not the memory to keep them.
        """
        return dataclasses.replace(self, train=decode_all(self.train.first(samples)))


def _check_labels(part: PackedJpegs, classes: int) -> None:
    wrong = np.flatnonzero((part.labels < 0) | (part.labels >= classes))
    if len(wrong):
        index = int(wrong[0])
        raise DataCorrupt(
            f"{part.name(index)} has the label {part.labels[index]}, not 0 to {classes - 1}; "
            f"next: the workload's parameter classes={int(part.labels.max()) + 1}"
        )


def load(*, verify: bool = False) -> PhotographSet:
    """The photographs of the first place that has any, packed in the cache first if need be."""
    place, train, test = _find_sources()
    pack = pack_photographs(NAME, train, test, verify=verify)
    return PhotographSet(
        train=_load_jpegs(pack, "train"),
        test=_load_jpegs(pack, "test") if test else None,
        bad=pack.bad,
        folder=place,
    )


def _load_jpegs(pack: PhotographPack, name: str) -> PackedJpegs:
    arrays = {key: pack.array(name, key) for key in ("encoded", "starts", "sizes", "labels")}
    return PackedJpegs(names=pack.names(name), **arrays)


def _find_sources() -> tuple[Path, PhotographSource, PhotographSource | None]:
    for place in search_folders():
        for kind in (find_shards, find_folders):
            train = kind(place, ("train",))
            if train is not None:
                return place, train, kind(place, ("validation", "val", "test"))
    for place in search_folders():
        alone = find_folders(place, ("",))
        if alone is not None:
            return place, alone, None
    looked = ", ".join(str(place) for place in search_folders())
    raise DataMissing(
        "no photographs: missing train-*.parquet with image.bytes and label, or a folder per "
        f"class with JPEGs (train/CLASS/*.jpg or CLASS/*.jpg); looked in {looked}; next: set "
        "NFOLD_DATA to the folder that has them"
    )


def search_folders() -> list[Path]:
    """Where photographs are looked for, in order."""
    chosen = os.environ.get("NFOLD_DATA")
    roots = [Path(chosen)] if chosen else []
    roots.append(cache_root() / "data")
    return [root / name for root in roots for name in FOLDERS]


# Photographs kept decoded, so that no epoch decodes them again: one file that all workers map.
#
# It lies beside the packed JPEGs in the cache, and the host's memory keeps what it can of it: a file
# that does not fit there would be read from the disk in every epoch, which is slower than decoding.

MAX_FREE_MEMORY_FRACTION = 0.8
"""The part of the host's free memory that decoded images may take."""


def decode_all(part: PackedJpegs) -> PackedJpegs:
    """The part with all its images decoded; MachineUnfit where they would not fit in memory."""
    file, needed = decoded_path(part), int(part.pixel_offsets[-1])
    if not (file.exists() and file.stat().st_size == needed):
        check_fits(needed, free_memory_bytes())
        _decode_to_file(part, file, needed)
    return map_decoded(part)


def map_decoded(part: PackedJpegs) -> PackedJpegs:
    """The part with the decoded images that ``kept_whole`` has left for it."""
    return dataclasses.replace(part, decoded_pixels=np.memmap(decoded_path(part), np.uint8, "r"))


def decoded_path(part: PackedJpegs) -> Path:
    """Where a part's decoded images are kept; another one for another number of samples."""
    folder = part.names.parent
    return folder.with_name(f"{folder.name}-decoded") / f"{part.names.stem}-{len(part)}.raw"


def check_fits(needed_bytes: int, free: int) -> None:
    """Raise MachineUnfit, with the sizes, where decoded images would not stay in memory."""
    if needed_bytes > MAX_FREE_MEMORY_FRACTION * free:
        raise MachineUnfit(
            f"photographs kept decoded: needs {needed_bytes / 2**30:.3g} GiB of the host's memory, "
            f"of whose free {free / 2**30:.3g} GiB they may take {MAX_FREE_MEMORY_FRACTION:.0%}; next: "
            "--cache off, --input loader"
        )


def _decode_to_file(part: PackedJpegs, file: Path, needed_bytes: int) -> None:
    aside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole: Images = np.memmap(aside, np.uint8, "w+", shape=(needed_bytes,))

        def one(index: int) -> None:
            whole[part.pixel_offsets[index] : part.pixel_offsets[index + 1]] = part.decode(
                index
            ).ravel()

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            for _ in threads.map(one, range(len(part))):
                pass
        os.rename(aside, file)
    except OSError as error:
        raise MachineUnfit(
            f"{file} cannot be written: {error}; next: make room there, or --cache off"
        ) from error
    finally:
        aside.unlink(missing_ok=True)
