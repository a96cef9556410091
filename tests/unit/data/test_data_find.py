from __future__ import annotations

from pathlib import Path

import pytest

from nfold.data.arrays import DataSetArrays
from nfold.data.find import cache_root, download_folder, find_files, search_folders
from nfold.data.forms import DataSetFormat, DataSetSpec, DownloadFile, Paths
from nfold.errors import DataMissing


def never(_: Paths) -> DataSetArrays:
    raise AssertionError("finding decodes nothing")


WHOLE = DataSetFormat(description="whole", files={"train.bin": "", "test.bin": ""}, decode=never)
PART = DataSetFormat(description="test alone", files={"test.bin": ""}, decode=never)
SHARDS = DataSetFormat(description="shards", files={"train-*.parquet": ""}, decode=never)


def data_set(*forms: DataSetFormat, downloads: tuple[DownloadFile, ...] = ()) -> DataSetSpec:
    return DataSetSpec(
        name="made", formats=forms, instructions="ask Ada", downloads=downloads, subfolders=("raw",)
    )


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


@pytest.mark.parametrize("inside", ["made", "made/raw", "."])
def test_a_set_is_found_in_its_folders_and_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    place = put(tmp_path / "data" / inside, "train.bin", "test.bin")
    monkeypatch.setenv("NFOLD_DATA", str(tmp_path / "data"))
    found = find_files(data_set(WHOLE))
    assert found.paths["test.bin"] == [place / "test.bin"]


def test_nfolds_own_folder_is_looked_into_last(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(own_cache / "data" / "made", "train.bin", "test.bin")
    assert find_files(data_set(WHOLE)).paths["train.bin"][0].parent == download_folder(
        data_set(WHOLE)
    )
    chosen = put(tmp_path / "chosen", "train.bin", "test.bin")
    monkeypatch.setenv("NFOLD_DATA", str(chosen))
    assert find_files(data_set(WHOLE)).paths["train.bin"][0].parent == chosen


def test_the_best_form_of_a_place_is_taken_and_a_chosen_place_before_a_better_form(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(own_cache / "data", "train.bin", "test.bin")
    assert find_files(data_set(WHOLE, PART)).format is WHOLE
    monkeypatch.setenv("NFOLD_DATA", str(put(tmp_path / "chosen", "test.bin")))
    assert find_files(data_set(WHOLE, PART)).format is PART


def test_files_of_one_form_do_not_mix_places(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(own_cache / "data", "train.bin")
    monkeypatch.setenv("NFOLD_DATA", str(put(tmp_path / "chosen", "test.bin")))
    with pytest.raises(DataMissing):
        find_files(data_set(WHOLE))


def test_a_gzipped_file_stands_for_its_content_and_the_plain_one_comes_first(
    own_cache: Path,
) -> None:
    place = put(own_cache / "data", "test.bin.gz")
    assert find_files(data_set(PART)).paths["test.bin"] == [place / "test.bin.gz"]
    put(place, "test.bin")
    assert find_files(data_set(PART)).paths["test.bin"] == [place / "test.bin"]


def test_a_pattern_finds_all_shards_in_order(own_cache: Path) -> None:
    names = ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    place = put(own_cache / "data", *reversed(names), "test-00000-of-00001.parquet")
    assert find_files(data_set(SHARDS)).paths["train-*.parquet"] == [place / name for name in names]


def test_a_folder_of_that_name_is_no_file(own_cache: Path) -> None:
    (own_cache / "data" / "test.bin").mkdir(parents=True)
    with pytest.raises(DataMissing):
        find_files(data_set(PART))


def test_missing_says_which_files_every_place_and_what_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NFOLD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataMissing) as caught:
        find_files(data_set(WHOLE, SHARDS))
    said = str(caught.value)
    assert "train.bin, test.bin (whole) or train-*.parquet (shards)" in said
    assert len(search_folders(data_set(WHOLE))) == 6
    assert all(str(place) in said for place in search_folders(data_set(WHOLE)))
    assert said.endswith("next: ask Ada")


def test_missing_offers_the_download_where_there_is_one() -> None:
    download = DownloadFile(url="https://example.org/test.bin", size_bytes=1, sha256="")
    with pytest.raises(DataMissing, match="NFOLD_DOWNLOAD=1"):
        find_files(data_set(PART, downloads=(download,)))


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NFOLD_CACHE")
    assert cache_root() == Path.home() / ".cache" / "nfold"
