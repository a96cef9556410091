"""."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from nfold.core.errors import DataCorrupt, DataMissing, MachineUnfit
from nfold.data.arrays import DataSetArrays
from nfold.data.files import (
    DataSetFormat,
    DataSetSpec,
    DownloadFile,
    FoundFiles,
    Paths,
    cache_root,
    content_sha256,
    download_folder,
    file_sha256,
    find_files,
    read_content,
    search_folders,
    verify_files,
)


def test_a_download_is_named_after_its_address() -> None:
    address = "https://example.org/~data/mnist/t10k.gz"
    assert DownloadFile(url=address, size_bytes=1, sha256="").name == "t10k.gz"


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


def test_best_format_per_folder_and_chosen_folder_first(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(own_cache / "data", "train.bin", "test.bin")
    assert find_files(data_set(WHOLE, PART)).format is WHOLE
    monkeypatch.setenv("NFOLD_DATA", str(put(tmp_path / "chosen", "test.bin")))
    assert find_files(data_set(WHOLE, PART)).format is PART


def test_files_of_one_format_come_from_one_folder(
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


def test_missing_data_names_files_folders_and_next_step(
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


CONTENT = bytes(range(256)) * 40


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def refuse_to_decode(_: Paths) -> DataSetArrays:
    raise AssertionError("verifying decodes nothing")


def found(path: Path, *, expected: str) -> FoundFiles:
    form = DataSetFormat(description="made", files={"a.bin": expected}, decode=refuse_to_decode)
    return FoundFiles(format=form, paths={"a.bin": [path]})


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    return tmp_path / "a.bin"


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    (tmp_path / "a.bin.gz").write_bytes(gzip.compress(CONTENT))
    return tmp_path / "a.bin.gz"


def test_the_pinned_file_passes_plain_and_gzipped(plain: Path, zipped: Path) -> None:
    expected = sha256(CONTENT)
    assert verify_files(found(plain, expected=expected)) == {"a.bin": expected}
    assert verify_files(found(zipped, expected=expected)) == {"a.bin.gz": expected}


def test_a_flipped_bit_names_file_both_digests_and_the_next_step(plain: Path) -> None:
    raw = bytearray(CONTENT)
    raw[77] ^= 4
    plain.write_bytes(raw)
    with pytest.raises(DataCorrupt) as caught:
        verify_files(found(plain, expected=sha256(CONTENT)))
    said = str(caught.value)
    parts = (str(plain), sha256(CONTENT), f"NFOLD_ACCEPT_SHA256={sha256(bytes(raw))}")
    assert [part for part in parts if part not in said] == []


@pytest.mark.parametrize("accepted", ["{}", "00, {} ,11", "{:upper}"])
def test_the_users_own_export_is_accepted_by_its_digest(
    plain: Path, monkeypatch: pytest.MonkeyPatch, accepted: str
) -> None:
    own = sha256(CONTENT)
    text = own.upper() if "upper" in accepted else accepted.format(own)
    monkeypatch.setenv("NFOLD_ACCEPT_SHA256", text)
    assert verify_files(found(plain, expected=sha256(b"other"))) == {"a.bin": own}


def test_another_accepted_digest_does_not_help(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NFOLD_ACCEPT_SHA256", sha256(b"another") + ",")
    with pytest.raises(DataCorrupt):
        verify_files(found(plain, expected=sha256(b"other")))


@pytest.mark.parametrize("position", [0, 10, 60, -6, -1])
def test_a_flipped_bit_anywhere_in_a_gzipped_file_is_corrupt(zipped: Path, position: int) -> None:
    raw = bytearray(zipped.read_bytes())
    raw[position] ^= 0x10
    zipped.write_bytes(raw)
    with pytest.raises(DataCorrupt) as caught:
        verify_files(found(zipped, expected=sha256(CONTENT)))
    assert str(zipped) in str(caught.value)
    assert sha256(CONTENT) in str(caught.value)


def test_truncated_gzip_names_both_digests(zipped: Path) -> None:
    zipped.write_bytes(zipped.read_bytes()[:-20])
    with pytest.raises(DataCorrupt, match=f"{file_sha256(zipped)}"):
        content_sha256(zipped, sha256(CONTENT))


def test_content_has_exactly_the_size_that_is_expected(plain: Path, zipped: Path) -> None:
    assert read_content(plain, len(CONTENT)) == read_content(zipped, len(CONTENT)) == CONTENT
    with pytest.raises(DataCorrupt, match=f"{len(CONTENT)} bytes, expected {len(CONTENT) + 5}"):
        read_content(zipped, len(CONTENT) + 5)
    with pytest.raises(DataCorrupt, match="more than 100 bytes, expected 100"):
        read_content(zipped, 100)


def test_an_archive_is_taken_as_it_lies(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(gzip.compress(CONTENT))
    assert content_sha256(archive, "") == sha256(archive.read_bytes()) == file_sha256(archive)


def test_a_file_that_cannot_be_read_is_not_called_corrupt(tmp_path: Path) -> None:
    with pytest.raises(MachineUnfit, match=r"gone\.bin: cannot be read") as caught:
        file_sha256(tmp_path / "gone.bin")
    assert not isinstance(caught.value, DataCorrupt)
