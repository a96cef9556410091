"""Photographs packed into a few flat files, and JPEG decoding at full or reduced scale.

Decodes with simplejpeg if it is installed, otherwise with Pillow. Both use libjpeg-turbo and
return the same bytes; simplejpeg is faster (docs/decisions/input-pipeline.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nfold.core.errors import DataCorrupt, ExtraMissing
from nfold.core.format import terminal_safe
from nfold.data.arrays import Images, Labels
from nfold.data.cache import load_folder, map_array
from nfold.data.files import cache_root, read_parquet_rows

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

MAX_DCT_REDUCTION = 8  # the side of a JPEG block: one of its coefficients remains
MAX_PIXELS = 2**27
# raised by Pillow's readers for damaged bytes; SyntaxError is its PNG reader's
DECODE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, struct.error)


def import_pillow() -> Any:
    """Import Pillow's ``Image`` module; raises ExtraMissing."""
    try:
        from PIL import Image
    except ImportError:
        raise ExtraMissing("Pillow", "images") from None
    return Image


def verified_size(encoded: bytes) -> tuple[int, int]:
    """Return height and width of a JPEG that decodes completely; raises ValueError otherwise."""
    pillow_image = import_pillow()
    try:
        with pillow_image.open(io.BytesIO(encoded)) as image:
            width, height = image.size
            if image.format not in ("JPEG", "MPO"):
                raise ValueError(f"is {image.format}, not JPEG")
            if width * height > MAX_PIXELS:
                raise ValueError(f"is {width} × {height}, over {MAX_PIXELS} pixels")
            image.load()
    except pillow_image.DecompressionBombError as error:
        raise ValueError(f"is too large: {error}") from error
    except DECODE_ERRORS as error:
        reason = str(error).replace(repr(error.__class__), "")
        if not reason.startswith("is "):
            reason = f"is not a complete JPEG: {reason}"
        raise ValueError(reason) from error
    return height, width


def decode_jpeg(encoded: Images, height: int, width: int, reduction: int = 1) -> Images:
    """Decode a JPEG of this size to RGB [⌈height / reduction⌉, ⌈width / reduction⌉, 3].

    ``reduction`` is a power of two. Up to 8 the inverse DCT itself is reduced; beyond 8 the result
    is subsampled.
    """
    dct_reduction = min(reduction, MAX_DCT_REDUCTION)
    step = reduction // dct_reduction
    image: Images
    try:
        if simplejpeg is None:
            image = decode_with_pillow(encoded, height, width, dct_reduction)
        else:
            image = simplejpeg.decode_jpeg(
                encoded,
                "RGB",
                min_height=-(-height // dct_reduction),
                min_width=-(-width // dct_reduction),
                min_factor=dct_reduction,
                strict=False,
            )
    except ValueError:  # CMYK, which TurboJPEG does not convert
        image = decode_with_pillow(encoded, height, width, dct_reduction)
    return image[::step, ::step] if step > 1 else image


def decode_with_pillow(encoded: Images, height: int, width: int, reduction: int) -> Images:
    """Decode with Pillow, which also converts CMYK; ``reduction`` is at most 8."""
    with import_pillow().open(io.BytesIO(encoded.tobytes()), formats=("JPEG",)) as image:
        if reduction > 1:
            image.draft(None, (width // reduction, height // reduction))
        return np.asarray(image.convert("RGB"))


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedJpegs:
    """Concatenated JPEGs, their sizes (height, width) int64 [n, 2] and labels int64 [n].

    ``names`` is a text file with one image name per line. ``decoded_pixels`` are all images
    decoded and concatenated, or None.
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
        return self.encoded[self.starts[index] : self.starts[index + 1]]

    def name(self, index: int) -> str:
        """Return the file, or the shard with row and path."""
        return self.names.read_text().split("\n")[index]

    def first(self, samples: int) -> PackedJpegs:
        if not samples:
            return self
        return dataclasses.replace(self, sizes=self.sizes[:samples], labels=self.labels[:samples])

    @cached_property
    def pixel_offsets(self) -> Labels:
        """Offsets of the images in ``decoded_pixels``: int64 [n + 1]."""
        return np.cumsum([0, *(3 * self.sizes.prod(axis=1))])

    def decode(self, index: int, reduction: int = 1) -> Images:
        """Return image ``index``, from ``decoded_pixels`` if it is there and not reduced.

        Raises DataCorrupt with the file's name if it does not decode to its size.
        """
        height, width = self.sizes[index].tolist()
        if self.decoded_pixels is not None and reduction == 1:
            pixels = self.decoded_pixels[self.pixel_offsets[index] : self.pixel_offsets[index + 1]]
            return pixels.reshape(height, width, 3)
        try:
            image = decode_jpeg(self.jpeg(index), height, width, reduction)
        except (OSError, ValueError) as error:
            raise DataCorrupt(f"{self.name(index)} cannot be decoded: {error}") from error
        if image.shape[:2] != (-(-height // reduction), -(-width // reduction)):
            raise DataCorrupt(
                f"{self.name(index)}: decodes to {image.shape}, not {height} × {width}"
            )
        return image


# other formats than JPEG are reported as bad files
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff")


@dataclass(frozen=True)
class EncodedImage:
    name: str
    encoded: object
    label: object


@dataclass(frozen=True)
class PhotographSource:
    """Photographs in a fixed order, read lazily.

    ``files`` are photographs with their ``labels``, or Parquet files with the columns ``image``
    (``bytes``, ``path``) and ``label``.
    """

    files: Sequence[Path]
    labels: Sequence[int] | None = None

    def __iter__(self) -> Iterator[EncodedImage]:
        if self.labels is None:
            for file in self.files:
                rows = read_parquet_rows(file, "image", ["bytes", "path"])
                for row, (image, label) in enumerate(rows):
                    path = f" ({image['path']})" if image.get("path") else ""
                    yield EncodedImage(f"{file}: row {row}{path}", image.get("bytes"), label)
            return
        for file, label in zip(self.files, self.labels, strict=True):
            try:
                encoded = file.read_bytes()
            except OSError as error:
                raise DataCorrupt(f"{file}: cannot be read: {error}") from error
            yield EncodedImage(str(file), encoded, label)


def find_folders(root: Path, names: Sequence[str]) -> PhotographSource | None:
    """Return the first of the folders ``names`` that contains folders with images, the classes.

    Classes are numbered in alphabetical order. Raises DataCorrupt for a class without images.
    """
    for name in names:
        classes = [folder for folder in sorted((root / name).glob("*")) if folder.is_dir()]
        images = {folder: _images_in(folder) for folder in classes}
        if any(images.values()):
            empty = [str(folder) for folder, files in images.items() if not files and name]
            if empty:
                raise DataCorrupt(f"{empty[0]}: has no image; next: fill or remove the folder")
            classes_with_images = [files for files in images.values() if files]
            return PhotographSource(
                [file for files in classes_with_images for file in files],
                [label for label, files in enumerate(classes_with_images) for _ in files],
            )
    return None


def _images_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)


def find_shards(root: Path, names: Sequence[str]) -> PhotographSource | None:
    """Return the shards ``<name>-*.parquet`` in a folder or its subfolder ``data``."""
    for name in names:
        for folder in (root, root / "data"):
            files = sorted(folder.glob(f"{name}-*.parquet"))
            if files:
                return PhotographSource(files)
    return None


# Packing: every photograph is checked once by decoding it.
#
# A folder ``photographs-<digest>`` holds per split ``encoded``, ``starts``, ``sizes`` and
# ``labels`` as ``.npy``, ``names`` as text, and a ``manifest.json`` with the entries of these files
# and the skipped images. The digest is of the sources' names, sizes and modification times, because hashing
# hundreds of gigabytes at every start would take too long.

FORMAT_VERSION = 1  # part of the folder's name; increase it if packing changes
CHECK_BATCH = 256  # images that are checked in parallel
BadFiles = tuple[tuple[str, str], ...]  # (name, reason)


def pack_photographs(
    name: str, train: PhotographSource, test: PhotographSource | None, *, verify: bool
) -> tuple[Path, BadFiles]:
    """Return the folder of these photographs and the skipped files.

    Packs the photographs first if the folder is missing or damaged.
    """
    splits = {"train": train} | ({"test": test} if test else {})
    key: list[Any] = [FORMAT_VERSION]
    for split, source in splits.items():
        stats = [(str(file.absolute()), file.stat()) for file in source.files]
        key.append([split, [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]])
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    folder = cache_root() / f"{name}-{digest}"

    def fill(temporary: Path) -> dict[str, Any]:
        bad = [
            entry for name, source in splits.items() for entry in _write(source, temporary, name)
        ]
        return {"bad": bad}

    bad = load_folder(folder, fill, checksums=verify)["bad"]
    return folder, tuple((name, reason) for name, reason in bad)


def map_jpegs(folder: Path, split: str) -> PackedJpegs:
    """Memory-map the photographs of a split, ``train`` or ``test``, of a packed folder."""
    names = ("encoded", "starts", "sizes", "labels")
    arrays = {name: map_array(folder / f"{split}-{name}.npy") for name in names}
    return PackedJpegs(names=folder / f"{split}-names.txt", **arrays)


def _write(source: PhotographSource, folder: Path, split: str) -> list[tuple[str, str]]:
    bad: list[tuple[str, str]] = []
    sizes, labels, lengths, names = [], [], [0], []
    raw = folder / f"{split}-encoded.raw"
    with raw.open("wb") as file:
        for photograph, size in _check_all(source):
            if isinstance(size, str):
                bad.append((terminal_safe(photograph.name), terminal_safe(size)))
                continue
            assert isinstance(photograph.encoded, bytes)
            file.write(photograph.encoded)
            sizes.append(size)
            labels.append(photograph.label)
            lengths.append(len(photograph.encoded))
            names.append(terminal_safe(photograph.name))
    if not names:
        first = f": {bad[0][0]} {bad[0][1]}" if bad else ""
        raise DataCorrupt(f"no usable image{first}")
    _convert_to_npy(raw, folder / f"{split}-encoded.npy")
    arrays = {
        "sizes": np.array(sizes, np.int64),
        "labels": np.array(labels, np.int64),
        "starts": np.cumsum(lengths),
    }
    for name, array in arrays.items():
        np.save(folder / f"{split}-{name}.npy", array, allow_pickle=False)
    (folder / f"{split}-names.txt").write_text("\n".join(names))
    return bad


def _convert_to_npy(raw: Path, file: Path) -> None:
    array = np.lib.format.open_memmap(file, "w+", np.uint8, (raw.stat().st_size,))
    source = np.memmap(raw, np.uint8, "r")
    step = 2**26
    for start in range(0, len(source), step):
        array[start : start + step] = source[start : start + step]
    array.flush()
    raw.unlink()


def _check_all(source: PhotographSource) -> Iterator[tuple[EncodedImage, tuple[int, int] | str]]:
    remaining = iter(source)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        while batch := list(islice(remaining, CHECK_BATCH)):
            yield from zip(batch, threads.map(_size_or_reason, batch), strict=True)


def _size_or_reason(photograph: EncodedImage) -> tuple[int, int] | str:
    if not isinstance(photograph.encoded, bytes):
        return f"has {photograph.encoded!r:.40} instead of image bytes"
    if type(photograph.label) is not int:
        raise DataCorrupt(
            f"{photograph.name} has the label {photograph.label!r:.40}, not an integer"
        )
    try:
        return verified_size(photograph.encoded)
    except ValueError as error:
        return str(error)
