"""JPEGs to pixels, whole or at a reduced scale: simplejpeg where it is installed, else Pillow.

Both stand on libjpeg-turbo and give the same bytes (docs/decisions/input-pipeline.md); Pillow takes 1.6 times
as long.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nfold.core.errors import DataCorrupt, ExtraMissing
from nfold.core.format import terminal_safe
from nfold.data.arrays import Images, Labels
from nfold.data.cache import write_folder
from nfold.data.files import cache_root, file_sha256

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

MAX_DCT_REDUCTION = 8
"""A JPEG's blocks have 8 × 8 coefficients: decoding can leave out all but one of them."""
MAX_PIXELS = 2**27
DECODE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, struct.error)
"""What Pillow's reader raises for damaged bytes."""


def import_pillow() -> Any:
    """Pillow's module Image, or ExtraMissing."""
    try:
        from PIL import Image
    except ImportError:
        raise ExtraMissing("Pillow", "images") from None
    return Image


def verified_size(encoded: bytes) -> tuple[int, int]:
    """Height and width of a JPEG that decodes to its end; ValueError says what is wrong with it."""
    image_of = import_pillow()
    try:
        with image_of.open(io.BytesIO(encoded)) as image:
            width, height = image.size
            if image.format not in ("JPEG", "MPO"):
                raise ValueError(f"is {image.format}, not JPEG")
            if width * height > MAX_PIXELS:
                raise ValueError(f"is {width} × {height}, over {MAX_PIXELS} pixels")
            image.load()
    except image_of.DecompressionBombError as error:
        raise ValueError(f"is too large: {error}") from error
    except DECODE_ERRORS as error:
        said = str(error).replace(repr(error.__class__), "")
        raise ValueError(said if said.startswith("is ") else f"is no whole JPEG: {said}") from error
    return height, width


def decode_jpeg(encoded: Images, height: int, width: int, reduction: int = 1) -> Images:
    """The image [⌈height / reduction⌉, ⌈width / reduction⌉, 3] of a JPEG of this size.

    ``reduction`` is a power of two; up to 8 the transform itself leaves detail out, and beyond
    that every so-many-th pixel of the eighth is taken. Grayscale and CMYK become RGB.
    """
    by_dct = min(reduction, MAX_DCT_REDUCTION)
    step = reduction // by_dct
    image = _decode_reduced(encoded, height, width, by_dct)
    return image[::step, ::step] if step > 1 else image


def _decode_reduced(encoded: Images, height: int, width: int, reduction: int) -> Images:
    if simplejpeg is None:
        return decode_with_pillow(encoded, height, width, reduction)
    try:
        image: Images = simplejpeg.decode_jpeg(
            encoded,
            "RGB",
            min_height=-(-height // reduction),
            min_width=-(-width // reduction),
            min_factor=reduction,
            strict=False,
        )
    except ValueError:  # CMYK, which TurboJPEG leaves to others
        return decode_with_pillow(encoded, height, width, reduction)
    return image


def decode_with_pillow(encoded: Images, height: int, width: int, reduction: int) -> Images:
    """The same by Pillow, which also knows CMYK."""
    with import_pillow().open(io.BytesIO(encoded.tobytes()), formats=("JPEG",)) as image:
        if reduction > 1:
            image.draft(None, (width // reduction, height // reduction))
        return np.asarray(image.convert("RGB"))


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedJpegs:
    """JPEGs [n], their sizes as (height, width) int64 [n, 2] and labels int64 [n].

    ``whole`` are all of them decoded, [h, w, 3] after [h, w, 3], where they are kept so.
    """

    encoded: Images
    starts: Labels
    sizes: Labels
    labels: Labels
    names: Path
    decoded_pixels: Images | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def jpeg(self, index: int) -> Images:
        """The bytes of one file."""
        return self.encoded[self.starts[index] : self.starts[index + 1]]

    def name(self, index: int) -> str:
        """The file, or the shard, row and path in it."""
        return self.names.read_text().split("\n")[index]

    def first(self, samples: int) -> PackedJpegs:
        """The first so many; 0: all."""
        if not samples:
            return self
        kept = {name: getattr(self, name)[:samples] for name in ("sizes", "labels")}
        return dataclasses.replace(self, **kept)

    @cached_property
    def pixel_offsets(self) -> Labels:
        """Where each image begins in ``whole``, and the last one ends: int64 [n + 1]."""
        return np.cumsum([0, *(3 * self.sizes.prod(axis=1))])

    def decode(self, index: int, reduction: int = 1) -> Images:
        """An image, reduced; from ``whole`` where it is there and nothing is to be left out.

        Raises DataCorrupt with the name of a file that is no longer what it was.
        """
        height, width = self.sizes[index].tolist()
        if self.decoded_pixels is not None and reduction == 1:
            kept = self.decoded_pixels[self.pixel_offsets[index] : self.pixel_offsets[index + 1]]
            return kept.reshape(height, width, 3)
        try:
            image = decode_jpeg(self.jpeg(index), height, width, reduction)
        except (OSError, ValueError) as error:
            raise DataCorrupt(f"{self.name(index)} cannot be decoded: {error}") from error
        if image.shape[:2] != (-(-height // reduction), -(-width // reduction)):
            raise DataCorrupt(
                f"{self.name(index)}: decodes to {image.shape}, not {height} × {width}"
            )
        return image


IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff")
"""Files that are taken for images; those that are no JPEG are bad ones."""
ROWS_PER_READ = 256
"""Read at a time of a shard."""


@dataclass(frozen=True)
class EncodedImage:
    """An encoded image as it was found: what it is called in messages, its bytes, its label."""

    name: str
    encoded: object
    label: object


class PhotographSource(Protocol):
    """Photographs in a fixed order."""

    @property
    def files(self) -> Sequence[Path]:
        """Every file that they are read from."""

    def __iter__(self) -> Iterator[EncodedImage]:
        """All of them, read when they are asked for."""


@dataclass(frozen=True)
class FolderSource:
    """Files in a folder per class; classes are numbered in the order of their names."""

    files: Sequence[Path]
    labels: Sequence[int]

    def __iter__(self) -> Iterator[EncodedImage]:
        for file, label in zip(self.files, self.labels, strict=True):
            yield EncodedImage(str(file), _read_file(file), label)


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataCorrupt(f"{file}: cannot be read: {error}") from error


def find_folders(root: Path, names: Sequence[str]) -> FolderSource | None:
    """The first of these folders that has folders with images; DataCorrupt where one has none."""
    for name in names:
        classes = [folder for folder in sorted((root / name).glob("*")) if folder.is_dir()]
        found = {folder: _images_in(folder) for folder in classes}
        if any(found.values()):
            empty = [str(folder) for folder, files in found.items() if not files and name]
            if empty:
                raise DataCorrupt(f"{empty[0]}: has no image; next: fill or remove the folder")
            kept = [files for files in found.values() if files]
            return FolderSource(
                [file for files in kept for file in files],
                [label for label, files in enumerate(kept) for _ in files],
            )
    return None


def _images_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)


@dataclass(frozen=True)
class ParquetSource:
    """Parquet files with the columns ``image`` (``bytes``, ``path``) and ``label``."""

    files: Sequence[Path]

    def __iter__(self) -> Iterator[EncodedImage]:
        for file in self.files:
            yield from _read_rows(file)


def find_shards(root: Path, names: Sequence[str]) -> ParquetSource | None:
    """The shards ``train-*.parquet`` in a place, or in its folder ``data``."""
    for name in names:
        for folder in (root, root / "data"):
            files = sorted(folder.glob(f"{name}-*.parquet"))
            if files:
                return ParquetSource(files)
    return None


def _read_rows(file: Path) -> Iterator[EncodedImage]:
    pyarrow, parquet = _import_pyarrow()
    try:
        with parquet.ParquetFile(file) as shard:
            columns = ["image.bytes", "image.path", "label"]
            row = 0
            for batch in shard.iter_batches(ROWS_PER_READ, columns=columns):
                for image, label in zip(*map(_to_list, batch.columns), strict=True):
                    path = f" ({image['path']})" if image and image.get("path") else ""
                    yield EncodedImage(
                        f"{file}: row {row}{path}", (image or {}).get("bytes"), label
                    )
                    row += 1
    except (pyarrow.ArrowException, KeyError, OSError, ValueError) as error:
        raise DataCorrupt(
            f"{file}: not readable as Parquet with image.bytes and label: {error}"
        ) from error


def _to_list(column: Any) -> Any:
    return column.to_pylist()


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ExtraMissing("pyarrow", "images") from None
    return pyarrow, parquet


# Packs photographs into a few flat files of the cache, each checked once by decoding it whole.
#
# A folder ``photographs-<digest>`` holds per part ``encoded`` (all JPEGs, one after another),
# ``starts``, ``sizes`` and ``labels`` as ``.npy``, ``names`` as text, and a ``manifest.json`` with
# every file's size and SHA-256 and the images that were left out. The digest is of the sources'
# names, sizes and times: reading a hundred gigabytes at every start would take too long.

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
    array = np.lib.format.open_memmap(file, "w+", np.uint8, (raw.stat().st_size,))
    source = np.memmap(raw, np.uint8, "r")
    step = 2**26
    for start in range(0, len(source), step):
        array[start : start + step] = source[start : start + step]
    array.flush()
    raw.unlink()


def _check_all(source: PhotographSource) -> Iterator[tuple[EncodedImage, tuple[int, int] | str]]:
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
