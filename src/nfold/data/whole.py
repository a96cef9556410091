"""Photographs kept decoded, so that no epoch decodes them again: one file that all workers map.

It lies beside the packed JPEGs in the cache, and the host's memory keeps what it can of it: a file
that does not fit there would be read from the disk in every epoch, which is slower than decoding.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nfold.data.arrays import Images
from nfold.data.part import Part
from nfold.errors import MachineUnfit
from nfold.memory import free_bytes

MOST_OF_FREE = 0.8
"""The part of the host's free memory that decoded images may take."""


def kept_whole(part: Part) -> Part:
    """The part with all its images decoded; MachineUnfit where they would not fit in memory."""
    file, needed = file_of(part), int(part.pixels[-1])
    if not (file.exists() and file.stat().st_size == needed):
        check_fits(needed, free_bytes())
        _decode(part, file, needed)
    return mapped(part)


def mapped(part: Part) -> Part:
    """The part with the decoded images that ``kept_whole`` has left for it."""
    return dataclasses.replace(part, whole=np.memmap(file_of(part), np.uint8, "r"))


def file_of(part: Part) -> Path:
    """Where a part's decoded images are kept; another one for another number of samples."""
    folder = part.names.parent
    return folder.with_name(f"{folder.name}-decoded") / f"{part.names.stem}-{len(part)}.raw"


def check_fits(needed_bytes: int, free: int) -> None:
    """Raise MachineUnfit, with the sizes, where decoded images would not stay in memory."""
    if needed_bytes > MOST_OF_FREE * free:
        raise MachineUnfit(
            f"photographs kept decoded: needs {needed_bytes / 2**30:.3g} GiB of the host's memory, "
            f"of whose free {free / 2**30:.3g} GiB they may take {MOST_OF_FREE:.0%}; next: "
            "--cache off, --input loader"
        )


def _decode(part: Part, file: Path, needed_bytes: int) -> None:
    """Decode all images by as many threads as there are cores; aside, then renamed."""
    aside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole: Images = np.memmap(aside, np.uint8, "w+", shape=(needed_bytes,))

        def one(index: int) -> None:
            whole[part.pixels[index] : part.pixels[index + 1]] = part.decoded(index).ravel()

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
