"""Photographs as JPEGs: any number, any size, packed into one file that every worker maps.

``NFOLD_DATA`` holds them, as a folder per class (``train/cat/1.jpg``, or ``cat/1.jpg``) or as
Parquet in the Hugging Face form (``train-*.parquet`` with ``image.bytes``, ``image.path`` and
``label``); in it, or in its folder ``photographs``, ``imagenet`` or ``imagenet-sample``.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nfold.data.find import cache_root
from nfold.data.packing import PhotographPack, pack_photographs
from nfold.data.part import PackedJpegs
from nfold.data.sources import PhotographSource, find_folders, find_shards
from nfold.data.whole import decode_all
from nfold.errors import DataCorrupt, DataMissing

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
    """A place, its images for training and, if it has some, for evaluation."""
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
