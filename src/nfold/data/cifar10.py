"""CIFAR-10 (A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009).

As Parquet in the Hugging Face form (``parquet.py``), or in its own binary form, as an archive or
unpacked. The pickled form is not read.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from nfold.data.arrays import DataSetArrays, Split, assemble, check_labels
from nfold.data.forms import DataSetFormat, DataSetSpec, DownloadFile, Paths
from nfold.data.parquet import read_parquet
from nfold.data.verify import read_content
from nfold.errors import DataCorrupt

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
    """Read the six members from the archive; nothing of it is unpacked onto the disk."""
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
    """The six files in it; an archive with a link, a device or a name that leaves it is refused."""
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
    """Images and labels of records of one label byte and 3,072 bytes, colour by colour."""
    records = np.frombuffer(raw, np.uint8).reshape(BATCH_RECORDS, RECORD_BYTES)
    check_labels(path, records[:, 0], CLASSES)
    planes = records[:, 1:].reshape(BATCH_RECORDS, 3, SIDE, SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0].astype(np.int64)


def _join_batches(parts: list[Split]) -> DataSetArrays:
    """Five batches train and the sixth tests."""
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
