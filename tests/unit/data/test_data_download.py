from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from nfold.core.errors import DataCorrupt, DataMissing, MachineUnfit
from nfold.data import files as fetching
from nfold.data.files import DataSetSpec, DownloadFile, download_data_set, downloads_allowed

BODY = bytes(range(256)) * 3000
"""More than two chunks."""


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves BODY; /cut closes the connection half-way, /moved redirects, all else is 404."""

    asked: list[str]

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/a.bin")
            self.end_headers()
            return
        if self.path not in ("/a.bin", "/cut"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[: len(BODY) // 2] if self.path == "/cut" else BODY)

    def log_message(self, *_: Any) -> None:
        """Say nothing on the terminal."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server on the loopback; a proxy in the environment is passed by."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(Handler, "asked", [], raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def data_set(url: str, *, size: int = len(BODY), body: bytes = BODY) -> DataSetSpec:
    download = DownloadFile(url=url, size_bytes=size, sha256=sha256(body).hexdigest())
    return DataSetSpec(name="made", formats=(), instructions="", downloads=(download,))


def kept(own_cache: Path) -> list[str]:
    return [path.name for path in own_cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize("said", [None, "", "0", "true"])
def test_download_needs_permission(monkeypatch: pytest.MonkeyPatch, said: str | None) -> None:
    assert not downloads_allowed()
    if said is not None:
        monkeypatch.setenv("NFOLD_DOWNLOAD", said)
    assert not downloads_allowed()
    monkeypatch.setenv("NFOLD_DOWNLOAD", "1")
    assert downloads_allowed()


def test_download_is_complete_and_logged(
    server: str, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        download_data_set(data_set(f"{server}/a.bin"))
    assert (own_cache / "data" / "made" / "a.bin").read_bytes() == BODY
    assert kept(own_cache) == ["a.bin"]
    assert f"downloading {server}/a.bin" in caplog.text


def test_what_is_there_is_not_fetched_again(server: str, own_cache: Path) -> None:
    download_data_set(data_set(f"{server}/a.bin"))
    download_data_set(data_set(f"{server}/a.bin"))
    assert Handler.asked == ["/a.bin"]


def test_a_redirect_is_followed(server: str, own_cache: Path) -> None:
    download_data_set(data_set(f"{server}/moved"))
    assert (own_cache / "data" / "made" / "moved").read_bytes() == BODY


def test_another_file_than_the_pinned_one_is_not_kept(server: str, own_cache: Path) -> None:
    with pytest.raises(DataCorrupt) as caught:
        download_data_set(data_set(f"{server}/a.bin", body=b"other"))
    said = str(caught.value)
    expected, found = sha256(b"other").hexdigest(), sha256(BODY).hexdigest()
    assert [p for p in (f"{server}/a.bin", expected, found) if p not in said] == []
    assert kept(own_cache) == []


def test_a_file_that_does_not_end_is_stopped(server: str, own_cache: Path) -> None:
    with pytest.raises(DataCorrupt, match="sends more than 1000 bytes"):
        download_data_set(data_set(f"{server}/a.bin", size=1000))
    assert kept(own_cache) == []


def test_a_connection_that_breaks_leaves_nothing(server: str, own_cache: Path) -> None:
    with pytest.raises(MachineUnfit, match=f"{server}/cut"):
        download_data_set(data_set(f"{server}/cut"))
    assert kept(own_cache) == []


def test_while_it_comes_the_file_has_another_name(
    server: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    whole = fetching._verified_chunks

    def watched(download: DownloadFile) -> Iterator[bytes]:
        for chunk in whole(download):
            seen.append(kept(own_cache))
            yield chunk

    monkeypatch.setattr(fetching, "_verified_chunks", watched)
    download_data_set(data_set(f"{server}/a.bin"))
    assert len(seen) > 1
    assert all("a.bin" not in names for names in seen)


@pytest.mark.parametrize("address", ["{}/gone", "http://127.0.0.1:1/a", "file:///etc/hostname"])
def test_failed_download_names_next_step(server: str, own_cache: Path, address: str) -> None:
    with pytest.raises(DataMissing, match=r"download failed.*next: "):
        download_data_set(data_set(address.format(server)))
    assert kept(own_cache) == []


def test_unwritable_download_folder_is_machine_unfit(server: str, own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(MachineUnfit, match="NFOLD_CACHE"):
        download_data_set(data_set(f"{server}/a.bin"))
