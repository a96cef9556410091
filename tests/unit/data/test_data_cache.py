from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from made import arrays
from nfold.core.errors import MachineUnfit
from nfold.data import cache
from nfold.data.arrays import DataSetArrays
from nfold.data.files import DataSetFormat, DataSetSpec, Paths


@dataclass
class Decoder:
    """Counts how often the sources were decoded."""

    calls: int = 0
    made: DataSetArrays = field(default_factory=lambda: arrays(40))

    def __call__(self, paths: Paths) -> DataSetArrays:
        self.calls += 1
        return self.made


@pytest.fixture
def decoder() -> Decoder:
    return Decoder()


@pytest.fixture
def data_set(own_cache: Path, decoder: Decoder) -> DataSetSpec:
    source = own_cache / "data" / "made" / "a.bin"
    source.parent.mkdir(parents=True)
    source.write_bytes(b"source")
    return made(decoder, b"source")


def made(decoder: Decoder, source: bytes) -> DataSetSpec:
    form = DataSetFormat(
        description="made", files={"a.bin": sha256(source).hexdigest()}, decode=decoder
    )
    return DataSetSpec(name="made", formats=(form,), instructions="")


def folder(root: Path) -> Path:
    (found,) = root.glob("made-*")
    return found


def test_the_arrays_come_back_as_read_only_maps(data_set: DataSetSpec, decoder: Decoder) -> None:
    read = cache.load(data_set, verify=True)
    for name in cache.ARRAYS:
        mapped = getattr(read, name)
        assert isinstance(mapped, np.memmap)
        assert not mapped.flags.writeable
        assert np.array_equal(mapped, getattr(decoder.made, name))
    assert (read.mean, read.std, read.classes) == ((128.0,), (74.0,), 10)
    assert read.train_labels.dtype == np.int64


@pytest.mark.parametrize("verify", [True, False])
def test_sources_are_decoded_once(data_set: DataSetSpec, decoder: Decoder, verify: bool) -> None:
    for _ in range(3):
        cache.load(data_set, verify=verify)
    assert decoder.calls == 1


def test_other_sources_have_another_cache(
    data_set: DataSetSpec, decoder: Decoder, own_cache: Path
) -> None:
    cache.load(data_set, verify=True)
    (own_cache / "data" / "made" / "a.bin").write_bytes(b"other")
    cache.load(made(decoder, b"other"), verify=True)
    assert decoder.calls == 2
    assert len(list(own_cache.glob("made-*"))) == 2


def test_other_decoding_has_another_cache(
    data_set: DataSetSpec, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.load(data_set, verify=True)
    monkeypatch.setattr(cache, "FORMAT_VERSION", cache.FORMAT_VERSION + 1)
    cache.load(data_set, verify=True)
    assert decoder.calls == 2


def test_manifest_has_sizes_and_digests(data_set: DataSetSpec, own_cache: Path) -> None:
    cache.load(data_set, verify=True)
    manifest = json.loads((folder(own_cache) / "manifest.json").read_text())
    images = folder(own_cache) / "train_images.npy"
    assert manifest["sources"] == {"a.bin": sha256(b"source").hexdigest()}
    assert manifest["files"]["train_images.npy"] == {
        "bytes": images.stat().st_size,
        "sha256": sha256(images.read_bytes()).hexdigest(),
    }


def flip(cached: Path) -> None:
    raw = bytearray((cached / "train_images.npy").read_bytes())
    raw[-1] ^= 1
    (cached / "train_images.npy").write_bytes(raw)


def cut(cached: Path) -> None:
    raw = (cached / "test_labels.npy").read_bytes()
    (cached / "test_labels.npy").write_bytes(raw[:-8])


def remove(cached: Path) -> None:
    (cached / "train_labels.npy").unlink()


def garble(cached: Path) -> None:
    (cached / "manifest.json").write_text('{"files": [')


def empty(cached: Path) -> None:
    (cached / "manifest.json").write_text("[]")


@pytest.mark.parametrize("damage", [flip, cut, remove, garble, empty])
def test_damaged_cache_is_rebuilt(
    data_set: DataSetSpec, decoder: Decoder, own_cache: Path, damage: Callable[[Path], None]
) -> None:
    cache.load(data_set, verify=True)
    damage(folder(own_cache))
    read = cache.load(data_set, verify=True)
    assert decoder.calls == 2
    assert np.array_equal(read.train_images, decoder.made.train_images)
    assert [entry.name[0] for entry in own_cache.iterdir() if entry.name != "data"] == ["m"]
    cache.load(data_set, verify=True)
    assert decoder.calls == 2


@pytest.mark.parametrize("damage", [cut, remove, garble])
def test_incomplete_cache_is_detected_by_size(
    data_set: DataSetSpec, decoder: Decoder, own_cache: Path, damage: Callable[[Path], None]
) -> None:
    cache.load(data_set, verify=True)
    damage(folder(own_cache))
    cache.load(data_set, verify=False)
    assert decoder.calls == 2


def test_folder_of_another_process_is_kept(
    data_set: DataSetSpec, decoder: Decoder, own_cache: Path
) -> None:
    """Another process finishes the same cache while this one still decodes."""
    inner = Decoder()
    first = made(inner, b"source")

    class Slow(Decoder):
        def __call__(self, paths: Paths) -> DataSetArrays:
            cache.load(first, verify=True)
            (folder(own_cache) / "mark").touch()
            return super().__call__(paths)

    cache.load(made(Slow(), b"source"), verify=True)
    assert (folder(own_cache) / "mark").exists()
    assert inner.calls == 1


def test_a_map_outlives_the_repair_of_its_cache(
    data_set: DataSetSpec, decoder: Decoder, own_cache: Path
) -> None:
    held = cache.load(data_set, verify=True)
    remove(folder(own_cache))
    cache.load(data_set, verify=True)
    assert np.array_equal(held.train_images, decoder.made.train_images)


def test_a_pickle_in_the_cache_is_not_read(data_set: DataSetSpec, own_cache: Path) -> None:
    cache.load(data_set, verify=True)
    images = folder(own_cache) / "train_images.npy"
    np.save(images, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    manifest = json.loads((folder(own_cache) / "manifest.json").read_text())
    manifest["files"]["train_images.npy"]["bytes"] = images.stat().st_size
    (folder(own_cache) / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="object"):
        cache.load(data_set, verify=False)


def test_unwritable_cache_is_machine_unfit(
    data_set: DataSetSpec, decoder: Decoder, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(MachineUnfit, match=r"No space left.*next: .*NFOLD_CACHE"):
        cache.load(data_set, verify=True)
    assert [entry.name for entry in own_cache.iterdir()] == ["data"]


def test_sources_are_verified_with_a_complete_cache(data_set: DataSetSpec, own_cache: Path) -> None:
    cache.load(data_set, verify=True)
    shutil.rmtree(own_cache / "data")
    with pytest.raises(MachineUnfit, match=r"missing a\.bin"):
        cache.load(data_set, verify=False)
