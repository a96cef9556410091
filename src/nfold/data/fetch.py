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

from nfold.data.find import own_folder
from nfold.data.forms import DataSet, Download
from nfold.errors import DataCorrupt, DataMissing, MachineUnfit

ALLOWED = "NFOLD_DOWNLOAD"
CHUNK = 2**18
TIMEOUT_S = 60
"""Without a byte for so long, a download has failed."""

log = logging.getLogger(__name__)


def allowed() -> bool:
    """Whether the user lets nfold use the network for data."""
    return os.environ.get(ALLOWED) == "1"


def fetch(data_set: DataSet) -> None:
    """Download what is not there yet into nfold's own folder; every download is logged.

    Raises DataMissing where the network fails, DataCorrupt for a file that is another than the
    pinned one, MachineUnfit where it cannot be written.
    """
    folder = own_folder(data_set)
    for download in data_set.downloads:
        if not (folder / download.name).exists():
            log.warning("downloading %s into %s", download.url, folder)
            _fetch(download, folder)


def _fetch(download: Download, folder: Path) -> None:
    part = folder / f".{download.name}.{secrets.token_hex(4)}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            for chunk in _checked(download):
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


def _checked(download: Download) -> Iterator[bytes]:
    """The file chunk by chunk; at its end DataCorrupt, if it was not the pinned one."""
    digest, size = hashlib.sha256(), 0
    for chunk in _received(download.url):
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


def _received(url: str) -> Iterator[bytes]:
    try:
        with _opener().open(url, timeout=TIMEOUT_S) as answer:
            while chunk := answer.read(CHUNK):
                yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise DataMissing(
            f"{url}: cannot be downloaded: {error}; next: get it by another way and set "
            "NFOLD_DATA to its folder"
        ) from error


def _opener() -> urllib.request.OpenerDirector:
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
