"""Downloading a data set, only when the user says so: NFOLD_DOWNLOAD=1.

A file is written under a temporary name, compared with its pinned size and SHA-256, and renamed:
under its own name there is never a part of a file, nor another file.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import secrets
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nfold.data.find import download_folder
from nfold.data.forms import DataSetSpec, DownloadFile
from nfold.errors import DataCorrupt, DataMissing, MachineUnfit

DOWNLOAD_VARIABLE = "NFOLD_DOWNLOAD"
DOWNLOAD_BYTES = 2**18
DOWNLOAD_TIMEOUT_S = 60
"""Without a byte for so long, a download has failed."""

log = logging.getLogger(__name__)


def downloads_allowed() -> bool:
    """Whether the user lets nfold use the network for data."""
    return os.environ.get(DOWNLOAD_VARIABLE) == "1"


def download_data_set(data_set: DataSetSpec) -> None:
    """Download what is not there yet into nfold's own folder; every download is logged.

    Raises DataMissing where the network fails, DataCorrupt for a file that is another than the
    pinned one, MachineUnfit where it cannot be written.
    """
    folder = download_folder(data_set)
    for download in data_set.downloads:
        if not (folder / download.name).exists():
            log.warning("downloading %s into %s", download.url, folder)
            _download_file(download, folder)


def _download_file(download: DownloadFile, folder: Path) -> None:
    part = folder / f".{download.name}.{secrets.token_hex(4)}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            for chunk in _verified_chunks(download):
                file.write(chunk)
        part.replace(folder / download.name)
    except OSError as error:
        raise MachineUnfit(
            f"{folder} cannot be written: {error}; next: make room there, or NFOLD_CACHE=FOLDER"
        ) from error
    finally:
        # Gone where all went well; without its folder where that could not be made.
        with suppress(OSError):
            part.unlink()


def _verified_chunks(download: DownloadFile) -> Iterator[bytes]:
    """The file chunk by chunk; at its end DataCorrupt, if it was not the pinned one."""
    digest, size = hashlib.sha256(), 0
    for chunk in _received_chunks(download.url):
        size += len(chunk)
        if size > download.size_bytes:
            raise DataCorrupt(f"{download.url}: sends more than {download.size_bytes} bytes")
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != download.sha256:
        raise DataCorrupt(
            f"{download.url}: {size} of {download.size_bytes} bytes came, with SHA-256 "
            f"{digest.hexdigest()}, expected {download.sha256}; nothing was kept; next: try again"
        )


def _received_chunks(url: str) -> Iterator[bytes]:
    try:
        with _http_opener().open(url, timeout=DOWNLOAD_TIMEOUT_S) as answer:
            while chunk := answer.read(DOWNLOAD_BYTES):
                yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise DataMissing(
            f"{url}: cannot be downloaded: {error}; next: get it by another way and set "
            "NFOLD_DATA to its folder"
        ) from error


def _http_opener() -> urllib.request.OpenerDirector:
    """HTTP and HTTPS only, through the environment's proxies; no file:, no ftp:."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener
