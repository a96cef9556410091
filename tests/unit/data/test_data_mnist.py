from __future__ import annotations

import gzip
import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from nfold import data
from nfold.core.errors import DataCorrupt, DataMissing
from nfold.data import mnist
from nfold.data.mnist import read_idx

FIRST_TEN = [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
"""The labels that the test set is known to begin with."""


def idx(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    lengths = b"".join(n.to_bytes(4) for n in array.shape)
    return bytes((0, 0, 8, array.ndim)) + lengths + array.tobytes()


@pytest.fixture
def copied(shared_data: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "own" / "mnist"
    folder.mkdir(parents=True)
    for file in (shared_data / "mnist").iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All four files, plain, small, their digests accepted."""
    folder = tmp_path / "made"
    folder.mkdir()
    monkeypatch.setattr(mnist, "TRAIN_COUNT", 60)
    monkeypatch.setattr(mnist, "TEST_COUNT", 20)
    draw = np.random.default_rng(0)
    for names, count in ((mnist.TRAIN_FILES, 60), (mnist.TEST_FILES, 20)):
        images, labels = names
        pixels = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (folder / images).write_bytes(idx(pixels))
        (folder / labels).write_bytes(idx(draw.integers(0, 10, count, dtype=np.uint8)))
    accept(folder, monkeypatch)
    return folder


def accept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()]
    monkeypatch.setenv("NFOLD_ACCEPT_SHA256", ",".join(digests))


def test_real_test_files_are_split_in_file_order(shared_data: Path) -> None:
    data.prepare("mnist", shared_data)
    read = data.load("mnist")
    assert read.name == "mnist-9000"
    assert read.train_images.shape == (9000, 28, 28, 1)
    assert read.test_images.shape == (1000, 28, 28, 1)
    assert read.train_labels[:10].tolist() == FIRST_TEN
    whole = np.concatenate([read.train_labels, read.test_labels])
    raw = gzip.decompress((shared_data / "mnist" / "t10k-labels-idx1-ubyte.gz").read_bytes())
    assert whole.tolist() == list(raw[8:])


def test_a_gzip_of_ones_own_with_the_same_content_is_as_good(copied: Path) -> None:
    file = copied / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes()), compresslevel=1))
    data.prepare("mnist", copied)
    assert len(data.load("mnist").train_labels) == 9000


def test_all_four_files_are_mnist_as_published(made: Path) -> None:
    data.prepare("mnist", made)
    read = data.load("mnist")
    assert read.name == "mnist"
    assert (len(read.train_labels), len(read.test_labels)) == (60, 20)
    raw = (made / "train-images-idx3-ubyte").read_bytes()
    assert read.train_images.tobytes() == raw[16:]


@pytest.mark.parametrize("position", [100, 1000, 800_000, -3])
def test_a_flipped_bit_is_corrupt(copied: Path, position: int) -> None:
    file = copied / "t10k-images-idx3-ubyte.gz"
    raw = bytearray(file.read_bytes())
    raw[position] ^= 2
    file.write_bytes(raw)
    pinned = mnist.TEST_FILES["t10k-images-idx3-ubyte"]
    with pytest.raises(DataCorrupt) as caught:
        data.prepare("mnist", copied)
    assert str(file) in str(caught.value)
    assert pinned in str(caught.value)


def test_a_file_cut_short_is_corrupt(copied: Path) -> None:
    file = copied / "t10k-labels-idx1-ubyte.gz"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(DataCorrupt, match=str(file)):
        data.prepare("mnist", copied)


def test_images_without_labels_are_missing(copied: Path) -> None:
    (copied / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataMissing, match="t10k-labels-idx1-ubyte"):
        data.prepare("mnist", copied)


def test_a_label_out_of_range_names_file_and_row(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made / "train-labels-idx1-ubyte"
    raw = bytearray(file.read_bytes())
    raw[8 + 41] = 10
    file.write_bytes(raw)
    accept(made, monkeypatch)
    with pytest.raises(DataCorrupt, match=f"{file}: row 41 has the label 10"):
        data.prepare("mnist", made)


def test_an_accepted_file_of_another_count_is_refused(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made / "train-images-idx3-ubyte"
    file.write_bytes(idx(np.zeros((59, 28, 28), np.uint8)))
    accept(made, monkeypatch)
    with pytest.raises(DataCorrupt, match=f"{file}: {16 + 59 * 784} bytes, expected"):
        data.prepare("mnist", made)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x00\x08\x01\x00\x00\x00\x03ab",
        b"\x00\x00\x08\x01\x00\x00\x00\x03abcd",
        b"\x00\x00\x0d\x01\x00\x00\x00\x03abc",
        b"\x00\x00\x08\x01\x00\x00\x00\x04abc",
        b"",
    ],
    ids=["short", "long", "floats", "another length", "empty"],
)
def test_what_is_no_idx_file_of_that_shape_is_corrupt(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a").write_bytes(raw)
    with pytest.raises(DataCorrupt, match=str(tmp_path / "a")):
        read_idx(tmp_path / "a", (3,))


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(50_000_000)))
    with pytest.raises(DataCorrupt, match="more than 11 bytes"):
        read_idx(tmp_path / "a.gz", (3,))


def test_a_download_is_pinned_for_every_file() -> None:
    names = {download.name.removesuffix(".gz") for download in mnist.DOWNLOADS}
    assert names == {*mnist.TRAIN_FILES, *mnist.TEST_FILES}
    assert all(len(d.sha256) == 64 and d.url.startswith("https://") for d in mnist.DOWNLOADS)
