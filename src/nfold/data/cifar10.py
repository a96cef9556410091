"""CIFAR-10 (A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009).

As Parquet in the Hugging Face form, or in its own binary form, as an archive or unpacked. The
pickled form is not read. Decoding the JPEG-encoded Parquet takes about ten seconds, once.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from nfold.data.arrays import Arrays, Images, Labels, channel_statistics
from nfold.data.forms import DataSet, Form, content
from nfold.errors import DataCorrupt, ExtraMissing

TRAIN, TEST = 50_000, 10_000
SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE
PARQUET = dict(
    zip(
        ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
        (
            "a3448c92b1094cfc1c742dfc1641e328fe04b1f48fe44b788ec1a41746a5a0a9",
            "04d5b8216df81e6a25054345e6fe2171d1810dfbcb55962671e996a9574fc66f",
        ),
        strict=True,
    )
)
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


def read_parquet(path: Path, rows: int) -> tuple[Images, Labels]:
    """Images [n, 32, 32, 3] and labels [n] of a Parquet file of ``rows`` encoded images."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ExtraMissing("pyarrow", "images") from None
    try:
        table = parquet.read_table(path, columns=["img", "label"])
        encoded = table.column("img").combine_chunks().field("bytes").to_pylist()
        labels = np.asarray(table.column("label"), dtype=np.int64)
    except (pyarrow.ArrowException, KeyError, OSError, ValueError) as error:
        raise DataCorrupt(f"{path}: not readable as Parquet: {error}") from error
    images = np.stack([_decode_image(path, row, value) for row, value in enumerate(encoded)])
    return _checked(path, images, labels, rows)


def _decode_image(path: Path, row: int, encoded: bytes) -> Images:
    try:
        from PIL import Image
    except ImportError:
        raise ExtraMissing("Pillow", "images") from None
    try:
        image = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
    except (OSError, TypeError, ValueError) as error:
        raise DataCorrupt(f"{path}: row {row} is no image: {error}") from error
    if image.shape != (SIDE, SIDE, 3):
        raise DataCorrupt(f"{path}: row {row} has the shape {image.shape}, not 32 × 32 × 3")
    return image


def read_binary(path: Path, raw: bytes, rows: int) -> tuple[Images, Labels]:
    """Images and labels of records of one label byte and 3,072 bytes, colour by colour."""
    if len(raw) != rows * RECORD:
        raise DataCorrupt(f"{path}: {len(raw)} bytes, expected {rows * RECORD}")
    records = np.frombuffer(raw, np.uint8).reshape(rows, RECORD)
    planes = records[:, 1:].reshape(rows, 3, SIDE, SIDE)
    images = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return _checked(path, images, records[:, 0].astype(np.int64), rows)


def _checked(path: Path, images: Images, labels: Labels, rows: int) -> tuple[Images, Labels]:
    if len(images) != rows or len(labels) != rows:
        raise DataCorrupt(f"{path}: {len(images)} images, {len(labels)} labels, expected {rows}")
    if labels.min() < 0 or labels.max() > 9:
        raise DataCorrupt(f"{path}: labels from {labels.min()} to {labels.max()}, not 0 to 9")
    return images, labels


def _from_parquet(paths: Mapping[str, Path]) -> Arrays:
    train, test = (paths[name] for name in PARQUET)
    return _arrays(read_parquet(train, TRAIN), read_parquet(test, TEST))


def _from_binary(paths: Mapping[str, Path]) -> Arrays:
    parts = [read_binary(paths[name], content(paths[name]), TEST) for name in BINARY]
    return _joined(parts)


def _from_archive(paths: Mapping[str, Path]) -> Arrays:
    """Read the six members from the archive; nothing of it is unpacked onto the disk."""
    (path,) = paths.values()
    parts = []
    with tarfile.open(path) as archive:
        for name in BINARY:
            member = archive.extractfile(_regular(archive, path, name))
            assert member is not None
            parts.append(read_binary(path, member.read(), TEST))
    return _joined(parts)


def _regular(archive: tarfile.TarFile, path: Path, name: str) -> tarfile.TarInfo:
    """A member that is a plain file: a link in an archive is refused."""
    found = [member for member in archive.getmembers() if Path(member.name).name == name]
    if len(found) != 1 or not found[0].isreg():
        raise DataCorrupt(f"{path}: {name} is not exactly one plain file in it")
    return found[0]


def _joined(parts: list[tuple[Images, Labels]]) -> Arrays:
    """Five batches train and the sixth tests."""
    images = np.concatenate([images for images, _ in parts[:5]])
    labels = np.concatenate([labels for _, labels in parts[:5]])
    return _arrays((images, labels), parts[5])


def _arrays(train: tuple[Images, Labels], test: tuple[Images, Labels]) -> Arrays:
    mean, std = channel_statistics(train[0])
    return Arrays(
        name="cifar10",
        classes=10,
        train_images=train[0],
        train_labels=train[1],
        test_images=test[0],
        test_labels=test[1],
        mean=mean,
        std=std,
    )


DATA_SET = DataSet(
    name="cifar10",
    forms=(
        Form(title="Parquet", files=PARQUET, decode=_from_parquet),
        Form(title="binary archive", files=ARCHIVE, decode=_from_archive),
        Form(title="unpacked binary files", files=BINARY, decode=_from_binary),
    ),
    get=(
        "put CIFAR-10's Parquet files or cifar-10-binary.tar.gz into a folder and set NFOLD_DATA "
        "to it"
    ),
)
