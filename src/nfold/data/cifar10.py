"""CIFAR-10 (A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009).

As Parquet in the Hugging Face form (``parquet.py``), or in its own binary form, as an archive or
unpacked. The pickled form is not read.
"""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nfold.core.errors import DataCorrupt, ExtraMissing
from nfold.data.arrays import DataSetArrays, Images, Split, assemble, check_labels
from nfold.data.files import DataSetFormat, DataSetSpec, DownloadFile, Paths, read_content

TRAIN_COUNT, TEST_COUNT = 50_000, 10_000
SIDE = 32
CLASSES = 10
RECORD_BYTES = 1 + 3 * SIDE * SIDE
BATCH_RECORDS = 10_000
"""Records in each of the six binary files."""

PARQUET = {
    "train-*.parquet": "a3448c92b1094cfc1c742dfc1641e328fe04b1f48fe44b788ec1a41746a5a0a9",
    "test-*.parquet": "04d5b8216df81e6a25054345e6fe2171d1810dfbcb55962671e996a9574fc66f",
}
ARCHIVE = {
    "cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
}
BINARY = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
DOWNLOAD = DownloadFile(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size_bytes=170_052_171,
    sha256=ARCHIVE["cifar-10-binary.tar.gz"],
)


def _from_parquet(paths: Paths) -> DataSetArrays:
    train, test = (paths[name] for name in PARQUET)
    return assemble(
        "cifar10",
        CLASSES,
        train=read_parquet(train, rows=TRAIN_COUNT, side=SIDE, classes=CLASSES),
        test=read_parquet(test, rows=TEST_COUNT, side=SIDE, classes=CLASSES),
    )


def _from_binary(paths: Paths) -> DataSetArrays:
    files = [path for name in BINARY for path in paths[name]]
    return _join_batches(
        [_batch(path, read_content(path, BATCH_RECORDS * RECORD_BYTES)) for path in files]
    )


def _from_archive(paths: Paths) -> DataSetArrays:
    ((path,),) = paths.values()
    with _archive(path) as archive:
        members = _members(path, archive)
        return _join_batches(
            [_batch(path / name, _read(archive, m)) for name, m in members.items()]
        )


@contextmanager
def _archive(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(path) as archive:
            yield archive
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataCorrupt(f"{path}: not readable as a tar archive: {error}") from error


def _members(path: Path, archive: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    found: dict[str, tarfile.TarInfo] = {}
    for member in archive:
        if not (member.isreg() or member.isdir()):
            raise DataCorrupt(f"{path}: {member.name!r} in it is a link or a device: refused")
        # The rule of tarfile's filter="data", which Python has only from 3.11.4 on.
        if member.name.startswith("/") or ".." in Path(member.name).parts:
            raise DataCorrupt(f"{path}: {member.name!r} leads out of the archive: refused")
        name = Path(member.name).name
        if name in found or (name in BINARY and member.size != BATCH_RECORDS * RECORD_BYTES):
            raise DataCorrupt(f"{path}: {member.name!r} in it is there twice or of a wrong size")
        found[name] = member
    missing = [name for name in BINARY if name not in found]
    if missing:
        raise DataCorrupt(f"{path}: has no {', '.join(missing)}")
    return {name: found[name] for name in BINARY}


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    return file.read()


def _batch(path: Path, raw: bytes) -> Split:
    records = np.frombuffer(raw, np.uint8).reshape(BATCH_RECORDS, RECORD_BYTES)
    check_labels(path, records[:, 0], CLASSES)
    planes = records[:, 1:].reshape(BATCH_RECORDS, 3, SIDE, SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0].astype(np.int64)


def _join_batches(parts: list[Split]) -> DataSetArrays:
    images = np.concatenate([images for images, _ in parts[:5]])
    labels = np.concatenate([labels for _, labels in parts[:5]])
    return assemble("cifar10", CLASSES, train=(images, labels), test=parts[5])


DATA_SET = DataSetSpec(
    name="cifar10",
    formats=(
        DataSetFormat(description="Parquet", files=PARQUET, decode=_from_parquet),
        DataSetFormat(description="binary archive", files=ARCHIVE, decode=_from_archive),
        DataSetFormat(description="unpacked binary files", files=BINARY, decode=_from_binary),
    ),
    instructions=(
        "put CIFAR-10's Parquet files or cifar-10-binary.tar.gz into a folder and set NFOLD_DATA "
        "to it"
    ),
    downloads=(DOWNLOAD,),
    subfolders=("cifar-10-batches-bin", "plain_text"),
)


# Images in Parquet in the Hugging Face form: columns ``img`` (``bytes``, ``path``) and ``label``.
#
# Decoding takes one core about 0.14 ms an image of 32 × 32 (7,000 a second), once.

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
