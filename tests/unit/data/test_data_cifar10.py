from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from nfold import data
from nfold.core.errors import DataCorrupt, DataMissing
from nfold.data import cifar10
from nfold.data.arrays import DataSetArrays

SMALL = 20


@pytest.fixture
def binaries(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The six files with 20 records each, in place of 10,000."""
    monkeypatch.setattr(cifar10, "BATCH_RECORDS", SMALL)
    draw = np.random.default_rng(0)
    made = {}
    for name in cifar10.BINARY:
        records = draw.integers(0, 256, (SMALL, cifar10.RECORD_BYTES), dtype=np.uint8)
        records[:, 0] = np.arange(SMALL) % 10
        made[name] = records.tobytes()
    return made


def accept(monkeypatch: pytest.MonkeyPatch, *files: Path) -> None:
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    monkeypatch.setenv("NFOLD_ACCEPT_SHA256", ",".join(digests))


def unpacked(folder: Path, content: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir(parents=True)
    for name, raw in content.items():
        (folder / name).write_bytes(raw)
    accept(monkeypatch, *folder.iterdir())
    return folder


def member(name: str, raw: bytes = b"") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(raw)
    return info, raw


def archived(
    folder: Path, members: list[tuple[tarfile.TarInfo, bytes]], monkeypatch: pytest.MonkeyPatch
) -> Path:
    folder.mkdir()
    path = folder / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for info, raw in members:
            archive.addfile(info, io.BytesIO(raw))
    accept(monkeypatch, path)
    return path


def members(binaries: dict[str, bytes]) -> list[tuple[tarfile.TarInfo, bytes]]:
    folder = tarfile.TarInfo("cifar-10-batches-bin")
    folder.type = tarfile.DIRTYPE
    files = [member(f"cifar-10-batches-bin/{name}", raw) for name, raw in binaries.items()]
    return [(folder, b""), *files, member("cifar-10-batches-bin/readme.html", b"hello")]


def loaded(folder: Path) -> DataSetArrays:
    data.prepare("cifar10", folder)
    return data.load("cifar10")


def check(read: DataSetArrays, binaries: dict[str, bytes]) -> None:
    assert (len(read.train_labels), len(read.test_labels)) == (5 * SMALL, SMALL)
    record = binaries["data_batch_2.bin"][3 * cifar10.RECORD_BYTES : 4 * cifar10.RECORD_BYTES]
    sample = SMALL + 3
    assert read.train_labels[sample] == record[0] == 3
    red, green, blue = (record[1 + c * 1024 : 1 + (c + 1) * 1024] for c in range(3))
    assert read.train_images[sample, ..., 0].tobytes() == red
    assert read.train_images[sample, ..., 1].tobytes() == green
    assert read.train_images[sample, ..., 2].tobytes() == blue
    assert read.test_images[0, 0, 0, 0] == binaries["test_batch.bin"][1]


@pytest.mark.slow(parts=8)
def test_the_real_set_has_its_60000_images(shared_data: Path) -> None:
    read = loaded(shared_data)
    assert read.train_images.shape == (50_000, 32, 32, 3)
    assert read.test_images.shape == (10_000, 32, 32, 3)
    assert np.bincount(read.train_labels).tolist() == [5000] * 10
    assert np.bincount(read.test_labels).tolist() == [1000] * 10
    # The means that everyone uses for CIFAR-10, which JPEG changes by less than a level.
    assert read.mean == pytest.approx((125.3, 122.95, 113.87), abs=0.5)
    assert read.std == pytest.approx((63.0, 62.1, 66.7), abs=1.0)


@pytest.mark.parametrize("change", ["flip", "cut"])
def test_a_damaged_parquet_file_is_corrupt(shared_data: Path, tmp_path: Path, change: str) -> None:
    folder = tmp_path / "own"
    shutil.copytree(shared_data / "cifar10", folder)
    file = folder / "test-00000-of-00001.parquet"
    file.chmod(0o600)
    raw = bytearray(file.read_bytes())
    raw[1_000_000] ^= 1
    file.write_bytes(raw if change == "flip" else raw[:-1])
    with pytest.raises(DataCorrupt) as caught:
        data.prepare("cifar10", folder)
    expected = cifar10.PARQUET["test-*.parquet"]
    assert f"{file}: SHA-256 is " in str(caught.value)
    assert f"expected {expected}" in str(caught.value)


def test_unpacked_binary_files_are_read(
    tmp_path: Path, binaries: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked(tmp_path / "data" / "cifar10" / "cifar-10-batches-bin", binaries, monkeypatch)
    check(loaded(tmp_path / "data"), binaries)


def test_the_archive_is_read_without_unpacking(
    tmp_path: Path, binaries: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = archived(tmp_path / "own", members(binaries), monkeypatch)
    check(loaded(path.parent), binaries)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_binary_file_of_another_size_is_refused(
    tmp_path: Path, binaries: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries["data_batch_3.bin"] = binaries["data_batch_3.bin"][:-1]
    folder = unpacked(tmp_path / "own", binaries, monkeypatch)
    with pytest.raises(DataCorrupt, match=r"data_batch_3\.bin: 61459 bytes, expected 61460"):
        data.prepare("cifar10", folder)


def test_a_label_out_of_range_names_file_and_row(
    tmp_path: Path, binaries: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = bytearray(binaries["test_batch.bin"])
    raw[7 * cifar10.RECORD_BYTES] = 200
    binaries["test_batch.bin"] = bytes(raw)
    path = archived(tmp_path / "own", members(binaries), monkeypatch)
    with pytest.raises(DataCorrupt, match=r"test_batch\.bin: row 7 has the label 200"):
        data.prepare("cifar10", path.parent)


def link(kind: bytes, name: str = "cifar-10-batches-bin/data_batch_1.bin") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = "/etc/passwd"
    return info


@pytest.mark.parametrize(
    "hostile",
    [
        (link(tarfile.SYMTYPE), b""),
        (link(tarfile.LNKTYPE, "cifar-10-batches-bin/other"), b""),
        (link(tarfile.CHRTYPE, "cifar-10-batches-bin/device"), b""),
        (link(tarfile.FIFOTYPE, "cifar-10-batches-bin/fifo"), b""),
        member("../outside.bin", b"x"),
        member("/outside.bin", b"x"),
        member("cifar-10-batches-bin/sub/data_batch_1.bin", b"x"),
    ],
    ids=["symbolic link", "hard link", "device", "fifo", "outside", "absolute", "twice"],
)
def test_a_hostile_archive_is_refused(
    tmp_path: Path,
    binaries: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    hostile: tuple[tarfile.TarInfo, bytes],
) -> None:
    path = archived(tmp_path / "own", [*members(binaries), hostile], monkeypatch)
    with pytest.raises(DataCorrupt, match=str(path)):
        data.prepare("cifar10", path.parent)
    assert not (tmp_path / "outside.bin").exists()


def test_a_member_that_is_missing_is_named(
    tmp_path: Path, binaries: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    del binaries["data_batch_4.bin"]
    path = archived(tmp_path / "own", members(binaries), monkeypatch)
    with pytest.raises(DataCorrupt, match=r"has no data_batch_4\.bin"):
        data.prepare("cifar10", path.parent)


@pytest.mark.parametrize("change", ["cut", "garbage", "cut inside gzip"])
def test_an_archive_that_breaks_off_is_corrupt(
    tmp_path: Path, binaries: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = archived(tmp_path / "own", members(binaries), monkeypatch)
    raw = path.read_bytes()
    shorter = gzip.compress(gzip.decompress(raw)[:200_000])
    path.write_bytes(
        {"cut": raw[:-5000], "garbage": b"x" * 999, "cut inside gzip": shorter}[change]
    )
    accept(monkeypatch, path)
    with pytest.raises(DataCorrupt, match=str(path)):
        data.prepare("cifar10", path.parent)


def test_the_pickled_form_is_not_even_looked_for(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    with pytest.raises(DataMissing):
        data.prepare("cifar10", tmp_path)
