"""Packs photographs into a few flat files of the cache, each checked once by decoding it whole.

A folder ``photographs-<digest>`` holds per part ``encoded`` (all JPEGs, one after another),
``starts``, ``sizes`` and ``labels`` as ``.npy``, ``names`` as text, and a ``manifest.json`` with
every file's size and SHA-256 and the images that were left out. The digest is of the sources'
names, sizes and times: reading a hundred gigabytes at every start would take too long.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nfold.data.decode import verified_size
from nfold.data.find import cache_root
from nfold.data.place import write_folder
from nfold.data.sources import EncodedImage, PhotographSource
from nfold.data.verify import file_sha256
from nfold.errors import DataCorrupt
from nfold.inert import terminal_safe

FORMAT_VERSION = 1
"""Part of every folder's name; one more whenever packing changes."""
CHECK_BATCH = 256
"""Images that are checked at a time, by as many threads as there are cores."""
MAX_VERIFIED_BYTES = 2**32
"""Bytes of the largest file whose SHA-256 is tested before a grid."""
BadFiles = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PhotographPack:
    """A packed folder."""

    folder: Path
    bad: BadFiles

    def array(self, part: str, name: str) -> Any:
        """One of its arrays, memory-mapped."""
        return np.load(self.folder / f"{part}-{name}.npy", mmap_mode="r", allow_pickle=False)

    def names(self, part: str) -> Path:
        """The file with the images' names, one a line."""
        return self.folder / f"{part}-names.txt"


def pack_photographs(
    name: str, train: PhotographSource, test: PhotographSource | None, *, verify: bool
) -> PhotographPack:
    """The pack of these sources, made first where there is none or it is damaged."""
    parts = {"train": train} | ({"test": test} if test else {})
    folder = cache_root() / f"{name}-{_key(parts)}"
    manifest = _manifest(folder, verify=verify)
    if manifest is None:
        _create_pack(parts, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
    return PhotographPack(folder, tuple((name, reason) for name, reason in manifest["bad"]))


def _key(parts: dict[str, PhotographSource]) -> str:
    said: list[Any] = [FORMAT_VERSION]
    for name, source in parts.items():
        states = [(str(file.absolute()), file.stat()) for file in source.files]
        said.append([name, [(path, state.st_size, state.st_mtime_ns) for path, state in states]])
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def _manifest(folder: Path, *, verify: bool) -> dict[str, Any] | None:
    """What a whole folder says of itself; None where it is missing or damaged."""
    try:
        said: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        for name, facts in said["files"].items():
            file = folder / name
            if file.stat().st_size != facts["bytes"]:
                return None
            small = facts["bytes"] <= MAX_VERIFIED_BYTES
            if verify and small and file_sha256(file) != facts["sha256"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return said


def _create_pack(parts: dict[str, PhotographSource], folder: Path) -> None:
    """Pack the sources into the cache."""

    def fill(aside: Path) -> None:
        bad = [entry for name, source in parts.items() for entry in _write(source, aside, name)]
        files = {
            file.name: {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
            for file in sorted(aside.iterdir())
        }
        text = json.dumps({"files": files, "bad": bad}, indent=1)
        (aside / "manifest.json").write_text(text)

    write_folder(folder, fill, lambda there, verify: _manifest(there, verify=verify) is not None)


def _write(source: PhotographSource, folder: Path, part: str) -> list[tuple[str, str]]:
    """Write one part; returns the bad ones. DataCorrupt where no image is left."""
    bad: list[tuple[str, str]] = []
    sizes, labels, lengths, names = [], [], [0], []
    raw = folder / f"{part}-encoded.raw"
    with raw.open("wb") as file:
        for photograph, found in _check_all(source):
            if isinstance(found, str):
                bad.append((terminal_safe(photograph.name), terminal_safe(found)))
                continue
            assert isinstance(photograph.encoded, bytes)
            file.write(photograph.encoded)
            sizes.append(found)
            labels.append(photograph.label)
            lengths.append(len(photograph.encoded))
            names.append(terminal_safe(photograph.name))
    if not names:
        raise DataCorrupt(f"no image can be used: {bad[0][0]} {bad[0][1]}" if bad else "no image")
    _as_npy(raw, folder / f"{part}-encoded.npy")
    _save(folder / f"{part}-sizes.npy", np.array(sizes, np.int64))
    _save(folder / f"{part}-labels.npy", np.array(labels, np.int64))
    _save(folder / f"{part}-starts.npy", np.cumsum(lengths))
    (folder / f"{part}-names.txt").write_text("\n".join(names))
    return bad


def _save(file: Path, array: npt.NDArray[np.int64]) -> None:
    np.save(file, array, allow_pickle=False)


def _as_npy(raw: Path, file: Path) -> None:
    """Bytes as an array that can be mapped: their number is known only after the last one."""
    array = np.lib.format.open_memmap(file, "w+", np.uint8, (raw.stat().st_size,))
    source = np.memmap(raw, np.uint8, "r")
    step = 2**26
    for start in range(0, len(source), step):
        array[start : start + step] = source[start : start + step]
    array.flush()
    raw.unlink()


def _check_all(source: PhotographSource) -> Iterator[tuple[EncodedImage, tuple[int, int] | str]]:
    """Every photograph with its height and width, or with what is wrong with it."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for group in _batched(source):
            yield from zip(group, threads.map(_size_or_reason, group), strict=True)


def _batched(source: Iterable[EncodedImage]) -> Iterator[list[EncodedImage]]:
    remaining = iter(source)
    while group := list(islice(remaining, CHECK_BATCH)):
        yield group


def _size_or_reason(photograph: EncodedImage) -> tuple[int, int] | str:
    if not isinstance(photograph.encoded, bytes):
        return f"has no image bytes but {photograph.encoded!r:.40}"
    if type(photograph.label) is not int:
        raise DataCorrupt(f"{photograph.name} has the label {photograph.label!r:.40}")
    try:
        return verified_size(photograph.encoded)
    except ValueError as error:
        return str(error)
