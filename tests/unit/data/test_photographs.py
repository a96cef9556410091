"""Photographs of folders and Parquet: packed once, checked, and what is bad is named."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from nfold import data
from nfold.core.errors import DataCorrupt, DataMissing, MachineUnfit
from nfold.data import photographs
from nfold.data.photographs import check_fits
from photos import SIZES, folders, jpeg


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NFOLD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "data"


def shard(file: Path, images: list[object], labels: list[object]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": image, "path": f"{i}.JPEG"} for i, image in enumerate(images)]
    parquet.write_table(pyarrow.table({"image": rows, "label": labels}), file)


def prepared(**changes: bool | int) -> photographs.PhotographSet:
    options = {"samples": 0, "classes": 10, "skip_bad": False, "decode": False, **changes}
    return data.prepare_photographs(None, **options)  # type: ignore[arg-type]


def test_a_folder_per_class_is_packed_in_order(place: Path) -> None:
    folders(place / "imagenet")
    part = prepared().train
    assert part.labels.tolist() == [0] * 4 + [1] * 4
    assert [tuple(size) for size in part.sizes.tolist()] == [*SIZES[::2], *SIZES[1::2]]
    assert part.name(4).endswith("train/class1/1.jpg")
    assert bytes(part.jpeg(4)) == (place / "imagenet/train/class1/1.jpg").read_bytes()


def test_class_folders_may_lie_at_the_top_and_there_may_be_a_test_set(place: Path) -> None:
    for part in ("train", "val"):
        folders(place / part, sizes=SIZES[:4])
        (place / part / "train").rename(place / f"{part}-classes")
        (place / part).rmdir()
    (place / "train-classes").rename(place / "train")
    (place / "val-classes").rename(place / "val")
    found = prepared()
    assert found.test is not None
    assert len(found.train) == len(found.test) == 4


def test_parquet_is_found_and_packed_once(place: Path) -> None:
    shard(place / "imagenet-sample/train-0.parquet", [jpeg(30, 40), jpeg(50, 20)], [3, 9])
    first = prepared().train
    assert first.labels.tolist() == [3, 9]
    assert "row 1 (1.JPEG)" in first.name(1)
    packed = first.names.stat()
    assert prepared().train.names.stat() == packed


def test_damaged_pack_is_rebuilt(place: Path) -> None:
    folders(place)
    first = prepared().train
    file = first.names.with_name("train-labels.npy")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert prepared().train.labels.tolist() == [0] * 4 + [1] * 4


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (jpeg(200, 200)[:-900], "not a complete JPEG"),
        (b"not an image at all", "not a complete JPEG"),
        (b"", "not a complete JPEG"),
        (png(), "PNG, not JPEG"),
    ],
)
def test_a_bad_file_is_named_or_skipped_and_counted(place: Path, content: bytes, said: str) -> None:
    folders(place)
    bad = place / "train/class1/bad.jpg"
    bad.write_bytes(content)
    with pytest.raises(DataCorrupt, match=rf"1 bad images.*bad\.jpg .*{said}.*--skip-bad"):
        prepared()
    found = prepared(skip_bad=True)
    assert len(found.train) == len(SIZES)
    assert found.bad_files_note is not None
    assert str(bad) in found.bad_files_note


def test_a_row_without_an_image_is_bad_and_a_label_must_be_a_number(place: Path) -> None:
    shard(place / "train-0.parquet", [jpeg(9, 9), None], [0, 1])
    with pytest.raises(DataCorrupt, match=r"row 1 .*instead of image bytes"):
        prepared()
    shard(place / "train-0.parquet", [jpeg(9, 9), jpeg(9, 9)], [0, None])
    with pytest.raises(DataCorrupt, match=r"row 1 .*label None"):
        prepared()


def test_labels_out_of_range_are_named(place: Path) -> None:
    shard(place / "train-0.parquet", [jpeg(9, 9), jpeg(9, 9)], [0, 12])
    with pytest.raises(DataCorrupt, match=r"row 1 .*label 12, not 0 to 9.*classes=13"):
        prepared()
    shard(place / "train-0.parquet", [jpeg(9, 9), jpeg(9, 9)], [0, -1])
    with pytest.raises(DataCorrupt, match="label -1"):
        prepared()


def test_missing_photographs_name_files_and_folders(place: Path) -> None:
    (place / "train").mkdir(parents=True)
    with pytest.raises(DataMissing, match=r"train-\*\.parquet.*CLASS.*looked in .*NFOLD_DATA"):
        prepared()


def test_an_empty_class_folder_is_named(place: Path) -> None:
    folders(place)
    (place / "train/empty").mkdir()
    with pytest.raises(DataCorrupt, match=r"train/empty: has no image"):
        prepared()


def test_gray_and_cmyk_become_rgb(place: Path) -> None:
    folder = place / "train/class0"
    folder.mkdir(parents=True)
    for mode in ("L", "CMYK"):
        (folder / f"{mode}.jpg").write_bytes(jpeg(40, 60, mode=mode))
    part = prepared().train
    for index in range(2):
        for reduction in (1, 2, 8):
            expected = (-(-40 // reduction), -(-60 // reduction), 3)
            assert part.decode(index, reduction).shape == expected
    gray = part.decode(1)
    assert np.array_equal(gray[..., 0], gray[..., 2])


def test_decoded_images_are_kept_and_are_the_same(place: Path) -> None:
    folders(place)
    plain, kept = prepared().train, prepared(decode=True).train
    assert kept.decoded_pixels is not None
    for index in range(len(plain)):
        np.testing.assert_array_equal(kept.decode(index), plain.decode(index))
    assert len(prepared(decode=True, samples=3).train) == 3


def test_what_does_not_fit_into_memory_is_refused_with_the_sizes() -> None:
    check_fits(2**30, 2**31)
    with pytest.raises(MachineUnfit, match=r"need 3 GiB.*free 2 GiB.*--cache off"):
        check_fits(3 * 2**30, 2 * 2**30)
