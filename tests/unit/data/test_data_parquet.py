from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nfold.core.errors import DataCorrupt, ExtraMissing
from nfold.data.arrays import Split
from nfold.data.cifar10 import decode_image, read_parquet

pyarrow = pytest.importorskip("pyarrow")
image_module = pytest.importorskip("PIL.Image")
from pyarrow import parquet  # noqa: E402 - after the skip

SIDE = 4
PIXELS = np.random.default_rng(0).integers(0, 256, (6, SIDE, SIDE, 3), dtype=np.uint8)


def encoded(pixels: Any, form: str = "PNG") -> bytes:
    raw = io.BytesIO()
    image_module.fromarray(pixels).save(raw, form)
    return raw.getvalue()


def rows() -> list[dict[str, Any]]:
    return [{"img": {"bytes": encoded(p), "path": None}, "label": i} for i, p in enumerate(PIXELS)]


def write(path: Path, content: list[dict[str, Any]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(content), path, row_group_size=4)
    return path


def read(*paths: Path, expected: int = len(PIXELS)) -> Split:
    return read_parquet(paths, rows=expected, side=SIDE, classes=10)


def test_images_and_labels_come_back(tmp_path: Path) -> None:
    images, labels = read(write(tmp_path / "a.parquet", rows()))
    assert np.array_equal(images, PIXELS)
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert labels.dtype == np.int64


def test_shards_are_joined_in_the_order_given(tmp_path: Path) -> None:
    first = write(tmp_path / "train-0.parquet", rows()[:2])
    second = write(tmp_path / "train-1.parquet", rows()[2:])
    images, labels = read(first, second)
    assert np.array_equal(images, PIXELS)
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_path_of_a_file_adds_no_column(tmp_path: Path) -> None:
    (tmp_path / "label=3").mkdir()
    assert read(write(tmp_path / "label=3" / "a.parquet", rows()))[1].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_missing_shard_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(DataCorrupt, match=r"a\.parquet: 2 images, expected 6"):
        read(write(tmp_path / "a.parquet", rows()[:2]))


def jpeg(row: int) -> bytes:
    return encoded(PIXELS[row], "JPEG")


CASES: dict[str, tuple[str, Any]] = {
    "no row": ("img", None),
    "no bytes": ("img", {"bytes": None, "path": None}),
    "not an image": ("img", {"bytes": b"nonsense", "path": None}),
    "cut png": ("img", {"bytes": encoded(PIXELS[3])[:50], "path": None}),
    "broken png": ("img", {"bytes": encoded(PIXELS[3]).replace(b"IDAT", b"XDAT"), "path": None}),
    "cut jpeg": ("img", {"bytes": jpeg(3)[:-30], "path": None}),
    "another size": ("img", {"bytes": encoded(PIXELS[3][:2]), "path": None}),
    "another format": ("img", {"bytes": encoded(PIXELS[3], "BMP"), "path": None}),
    "no label": ("label", None),
    "label too high": ("label", 10),
    "negative label": ("label", -1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_row_is_named(tmp_path: Path, case: str) -> None:
    content = rows()
    column, value = CASES[case]
    content[3][column] = value
    path = write(tmp_path / "a.parquet", content)
    with pytest.raises(DataCorrupt, match=rf"{path}: row 3 "):
        read(path)


def test_labels_that_are_words_are_refused(tmp_path: Path) -> None:
    content = [{**row, "label": "cat"} for row in rows()]
    with pytest.raises(DataCorrupt, match="row 0 has the label 'cat'"):
        read(write(tmp_path / "a.parquet", content))


def test_images_that_are_text_are_refused(tmp_path: Path) -> None:
    content = [{**row, "img": {"bytes": "text"}} for row in rows()]
    with pytest.raises(DataCorrupt, match=r"row 0 has .* instead of image bytes"):
        read(write(tmp_path / "a.parquet", content))


@pytest.mark.parametrize("renamed", ["img", "label"])
def test_a_missing_column_is_named(tmp_path: Path, renamed: str) -> None:
    content = [{("x" if k == renamed else k): v for k, v in row.items()} for row in rows()]
    with pytest.raises(DataCorrupt, match=r"a\.parquet: not readable as Parquet with img\.bytes"):
        read(write(tmp_path / "a.parquet", content))


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    schema = pyarrow.Table.from_pylist(rows()).schema
    parquet.write_table(schema.empty_table(), tmp_path / "a.parquet")
    with pytest.raises(DataCorrupt, match="0 images, expected 6"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("keep", [0, 3, 200, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "a.parquet", rows())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataCorrupt, match=str(path)):
        read(path)


@pytest.mark.parametrize(("module", "library"), [("pyarrow", "pyarrow"), ("PIL", "Pillow")])
def test_missing_reader_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, library: str
) -> None:
    path = write(tmp_path / "a.parquet", rows())
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ExtraMissing, match=rf"{library} is not installed.*nfold\[images\]"):
        read(path)


def test_a_grey_image_becomes_three_equal_channels(tmp_path: Path) -> None:
    image = decode_image(tmp_path, 0, encoded(PIXELS[0][..., 0]), SIDE)
    assert image.shape == (SIDE, SIDE, 3)
    assert np.array_equal(image[..., 0], image[..., 2])
