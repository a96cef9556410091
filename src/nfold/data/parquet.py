"""Images in Parquet in the Hugging Face form: columns ``img`` (``bytes``, ``path``) and ``label``.

Decoding takes one core about 0.14 ms an image of 32 × 32 (7,000 a second), once.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nfold.data.arrays import Images, Split, check_labels
from nfold.errors import DataCorrupt, ExtraMissing

IMAGE_FORMATS = ("PNG", "JPEG")
"""The encodings that are tried: no other decoder sees the bytes."""


def read_parquet(paths: Sequence[Path], *, rows: int, side: int, classes: int) -> Split:
    """Images [rows, side, side, 3] and labels [rows] of the shards, in the order of their names.

    Raises DataCorrupt with the file and the row that is wrong, ExtraMissing without the readers.
    """
    parts = [_shard(path, side, classes) for path in paths]
    images = np.concatenate([images for images, _ in parts])
    if len(images) != rows:
        names = ", ".join(str(path) for path in paths)
        raise DataCorrupt(f"{names}: {len(images)} images, expected {rows}; next: get all shards")
    return images, np.concatenate([labels for _, labels in parts])


def _shard(path: Path, side: int, classes: int) -> Split:
    encoded, said = _columns(path)
    images = np.empty((len(encoded), side, side, 3), np.uint8)
    for row, value in enumerate(encoded):
        images[row] = decode_image(path, row, value, side)
    wrong = next((row for row, label in enumerate(said) if not isinstance(label, int)), None)
    if wrong is not None:
        raise DataCorrupt(f"{path}: row {wrong} has the label {said[wrong]!r}")
    labels = np.asarray(said, dtype=np.int64)
    check_labels(path, labels, classes)
    return images, labels


def _columns(path: Path) -> tuple[list[Any], list[Any]]:
    """The encoded images and the labels, a None where a row has none."""
    try:
        import pyarrow
        from pyarrow import compute, parquet
    except ImportError:
        raise ExtraMissing("pyarrow", "images") from None
    try:
        # Not read_table: it takes partition columns from a path such as /data/label=3/.
        with parquet.ParquetFile(path) as file:
            table = file.read(columns=["img.bytes", "label"])
        encoded = compute.struct_field(table.column("img"), "bytes")
        return encoded.to_pylist(), table.column("label").to_pylist()
    except (pyarrow.ArrowException, KeyError, OSError, ValueError) as error:
        raise DataCorrupt(
            f"{path}: not readable as Parquet with img.bytes and label: {error}"
        ) from error


def decode_image(path: Path, row: int, encoded: object, side: int) -> Images:
    """One encoded image as [side, side, 3]; DataCorrupt with file and row where it is none."""
    try:
        from PIL import Image
    except ImportError:
        raise ExtraMissing("Pillow", "images") from None
    if not isinstance(encoded, bytes):
        raise DataCorrupt(f"{path}: row {row} has no image bytes but {encoded!r:.40}")
    try:
        image = Image.open(io.BytesIO(encoded), formats=IMAGE_FORMATS)
        if image.size == (side, side):
            return np.asarray(image.convert("RGB"))
    # Pillow's readers raise these for damaged bytes; SyntaxError is its PNG reader's.
    except (OSError, ValueError, SyntaxError, EOFError, struct.error) as error:
        raise DataCorrupt(f"{path}: row {row} is no image: {error}") from error
    except Image.DecompressionBombError as error:
        raise DataCorrupt(f"{path}: row {row} is too large: {error}") from error
    raise DataCorrupt(
        f"{path}: row {row} is {image.size[0]} × {image.size[1]}, not {side} × {side}"
    )
