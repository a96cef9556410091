"""CIFAR-10 (A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009).

Reads Parquet as on Hugging Face, and the binary version as an archive or unpacked. The pickled
Python version is not supported.
"""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nfold.core.errors import DataCorrupt
from nfold.data.arrays import DataSetArrays, Images, Split, assemble, check_labels
from nfold.data.files import (
    DataSetFormat,
    DataSetSpec,
    DownloadFile,
    Paths,
    read_content,
    read_parquet_rows,
)
from nfold.data.packed_jpegs import DECODE_ERRORS, import_pillow

TRAIN_COUNT, TEST_COUNT = 50_000, 10_000
SIDE = 32
CLASSES = 10
RECORD_BYTES = 1 + 3 * SIDE * SIDE
BATCH_RECORDS = 10_000  # per binary file

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
        [_decode_batch(path, read_content(path, BATCH_RECORDS * RECORD_BYTES)) for path in files]
    )


def _from_archive(paths: Paths) -> DataSetArrays:
    ((path,),) = paths.values()
    batches = []
    try:
        with tarfile.open(path) as archive:
            for name, member in _members(path, archive).items():
                file = archive.extractfile(member)
                assert file is not None
                batches.append(_decode_batch(path / name, file.read()))
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataCorrupt(f"{path}: not readable as a tar archive: {error}") from error
    return _join_batches(batches)


def _members(path: Path, archive: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    members: dict[str, tarfile.TarInfo] = {}
    for member in archive:
        if not (member.isreg() or member.isdir()):
            raise DataCorrupt(f"{path}: member {member.name!r} is a link or a device")
        # As tarfile's filter="data", which needs Python 3.11.4.
        if member.name.startswith("/") or ".." in Path(member.name).parts:
            raise DataCorrupt(f"{path}: member {member.name!r} leads out of the archive")
        name = Path(member.name).name
        if name in members or (name in BINARY and member.size != BATCH_RECORDS * RECORD_BYTES):
            raise DataCorrupt(f"{path}: member {member.name!r} is duplicated or has a wrong size")
        members[name] = member
    missing = [name for name in BINARY if name not in members]
    if missing:
        raise DataCorrupt(f"{path}: has no {', '.join(missing)}")
    return {name: members[name] for name in BINARY}


def _decode_batch(path: Path, raw: bytes) -> Split:
    records = np.frombuffer(raw, np.uint8).reshape(BATCH_RECORDS, RECORD_BYTES)
    check_labels(path, records[:, 0], CLASSES)
    planes = records[:, 1:].reshape(BATCH_RECORDS, 3, SIDE, SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0].astype(np.int64)


def _join_batches(batches: list[Split]) -> DataSetArrays:
    images = np.concatenate([images for images, _ in batches[:5]])
    labels = np.concatenate([labels for _, labels in batches[:5]])
    return assemble("cifar10", CLASSES, train=(images, labels), test=batches[5])


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


IMAGE_FORMATS = ("PNG", "JPEG")  # Pillow tries no other decoder


def read_parquet(paths: Sequence[Path], *, rows: int, side: int, classes: int) -> Split:
    """Read images [rows, side, side, 3] and labels [rows] of all shards, in order.

    Raises DataCorrupt with file and row, and ExtraMissing without pyarrow or Pillow.
    """
    shards = [_read_shard(path, side, classes) for path in paths]
    images = np.concatenate([images for images, _ in shards])
    if len(images) != rows:
        names = ", ".join(str(path) for path in paths)
        raise DataCorrupt(f"{names}: {len(images)} images, expected {rows}; next: get all shards")
    return images, np.concatenate([labels for _, labels in shards])


def _read_shard(path: Path, side: int, classes: int) -> Split:
    images, labels = [], []
    for row, (image, label) in enumerate(read_parquet_rows(path, "img", ["bytes"])):
        images.append(decode_image(path, row, image.get("bytes"), side))
        if not isinstance(label, int):
            raise DataCorrupt(f"{path}: row {row} has the label {label!r}, not an integer")
        labels.append(label)
    label_array = np.asarray(labels, dtype=np.int64)
    check_labels(path, label_array, classes)
    return np.asarray(images, np.uint8).reshape(-1, side, side, 3), label_array


def decode_image(path: Path, row: int, encoded: object, side: int) -> Images:
    """Decode one image to [side, side, 3]; raises DataCorrupt with file and row."""
    pillow_image = import_pillow()
    if not isinstance(encoded, bytes):
        raise DataCorrupt(f"{path}: row {row} has {encoded!r:.40} instead of image bytes")
    try:
        image = pillow_image.open(io.BytesIO(encoded), formats=IMAGE_FORMATS)
        if image.size == (side, side):
            return np.asarray(image.convert("RGB"))
    except DECODE_ERRORS as error:
        raise DataCorrupt(f"{path}: row {row} is not an image: {error}") from error
    except pillow_image.DecompressionBombError as error:
        raise DataCorrupt(f"{path}: row {row} is too large: {error}") from error
    raise DataCorrupt(
        f"{path}: row {row} is {image.size[0]} × {image.size[1]}, not {side} × {side}"
    )
