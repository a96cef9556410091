from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from nfold.data.arrays import DataSetArrays
from nfold.data.find import FoundFiles
from nfold.data.forms import DataSetFormat, Paths
from nfold.data.verify import content_sha256, file_sha256, read_content, verify_files
from nfold.errors import DataCorrupt, MachineUnfit

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


def test_a_gzipped_file_cut_short_says_its_own_digest(zipped: Path) -> None:
    zipped.write_bytes(zipped.read_bytes()[:-20])
    with pytest.raises(DataCorrupt, match=f"own SHA-256 is {file_sha256(zipped)}"):
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
