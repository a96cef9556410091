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
from nfold.data.part import PackedJpegs
from nfold.errors import MachineUnfit
from nfold.memory import free_memory_bytes

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
    """Decode all images by as many threads as there are cores; aside, then renamed."""
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
