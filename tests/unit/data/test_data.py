from __future__ import annotations

import dataclasses
import hashlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nfold import data
from nfold.core.errors import DataCorrupt, DataMissing, UnknownValue
from nfold.data import mnist
from nfold.data.files import DataSetSpec, DownloadFile


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A file server that says nothing on the terminal."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def served(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[http.server.ThreadingHTTPServer]:
    """MNIST's downloads, from a server on the loopback that has the two shared files."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = shared_data / "mnist"
    handler = partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        monkeypatch.setattr(mnist, "DATA_SET", pointed(folder, server.server_address[1]))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def pointed(folder: Path, port: int) -> DataSetSpec:
    downloads = tuple(
        DownloadFile(
            url=f"http://127.0.0.1:{port}/{file.name}",
            size_bytes=file.stat().st_size,
            sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        )
        for file in sorted(folder.iterdir())
    )
    return dataclasses.replace(mnist.DATA_SET, downloads=downloads)


def test_an_unknown_set_lists_the_known_ones() -> None:
    with pytest.raises(UnknownValue, match="unknown data set 'mnits': allowed are mnist, digits"):
        data.prepare("mnits")


@pytest.mark.parametrize("name", data.DATA_SETS)
def test_every_name_is_its_data_sets(name: str) -> None:
    assert data._data_set(name).name == name


def test_importing_it_is_light() -> None:
    heavy = ("numpy", "sklearn", "pyarrow", "PIL", "torch")
    code = f"import sys, nfold.data; print([m for m in {heavy} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_digits_need_no_file() -> None:
    data.prepare("digits")
    assert len(data.load("digits").train_labels) == 1437


def test_a_rank_without_a_cache_makes_it(own_cache: Path) -> None:
    assert len(data.load("digits").train_labels) == 1437
    assert len(list(own_cache.glob("digits-*"))) == 1


def test_two_processes_may_prepare_at_once(own_cache: Path) -> None:
    command = [sys.executable, "-c", "from nfold import data; data.prepare('digits')"]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert [path.name[:7] for path in own_cache.iterdir()] == ["digits-"]


def test_the_folder_given_is_known_to_ranks(shared_data: Path) -> None:
    data.prepare("mnist", shared_data)
    assert os.environ["NFOLD_DATA"] == str(shared_data.resolve())
    assert isinstance(data.load("mnist").train_images, np.memmap)


def test_without_leave_nothing_is_downloaded(served: object, own_cache: Path) -> None:
    with pytest.raises(DataMissing, match="NFOLD_DOWNLOAD=1"):
        data.prepare("mnist")
    assert not own_cache.exists()


def test_with_leave_what_is_missing_is_downloaded(
    served: object, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NFOLD_DOWNLOAD", "1")
    data.prepare("mnist")
    assert len(data.load("mnist").train_labels) == 9000
    assert len(list((own_cache / "data" / "mnist").iterdir())) == 2


def test_corrupt_file_is_not_downloaded_again(
    served: object, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NFOLD_DOWNLOAD", "1")
    data.prepare("mnist")
    file = own_cache / "data" / "mnist" / "t10k-labels-idx1-ubyte.gz"
    file.write_bytes(b"changed")
    with pytest.raises(DataCorrupt, match=str(file)):
        data.prepare("mnist")
    assert file.read_bytes() == b"changed"


def test_a_rank_never_downloads(
    served: object, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NFOLD_DOWNLOAD", "1")
    with pytest.raises(DataMissing):
        data.load("mnist")
    assert not own_cache.exists()
