"""What a data set is on a disk: the forms it comes in, their files, where they can be had."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import logging
import os
import secrets
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from nfold.core.errors import DataCorrupt, DataMissing, MachineUnfit
from nfold.data.arrays import DataSetArrays

Paths = Mapping[str, Sequence[Path]]
"""The files found for each of a form's names; several only where the name is a pattern."""

Decode = Callable[[Paths], DataSetArrays]


@dataclass(frozen=True, kw_only=True)
class DataSetFormat:
    """One form: its files by name or by pattern (``train-*.parquet``), each with its SHA-256.

    A file may lie there gzipped, under its name with ``.gz``; its digest is the content's, for
    two gzips of the same content differ. ``files`` may be empty: then nothing is needed.
    """

    description: str
    files: Mapping[str, str]
    decode: Decode


@dataclass(frozen=True, kw_only=True)
class DownloadFile:
    """A file on the network: its size and SHA-256 are of the file as it is sent."""

    url: str
    size_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name: the last part of its address."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class DataSetSpec:
    """A data set's forms, best first, and how a user gets it: in words and by downloading.

    ``subfolders`` are those that its publishers' archives and repositories unpack into.
    """

    name: str
    formats: Sequence[DataSetFormat]
    instructions: str
    downloads: Sequence[DownloadFile] = ()
    subfolders: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class FoundFiles:
    """A form whose files are all in one place."""

    format: DataSetFormat
    paths: Paths


def cache_root() -> Path:
    """NFOLD_CACHE, or ``~/.cache/nfold``."""
    chosen = os.environ.get("NFOLD_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "nfold"


def download_folder(data_set: DataSetSpec) -> Path:
    """Where nfold puts a data set that it downloads."""
    return cache_root() / "data" / data_set.name


def search_folders(data_set: DataSetSpec) -> list[Path]:
    """Where a data set is looked for, in order: in every root its own folder first."""
    chosen = os.environ.get("NFOLD_DATA")
    roots = [Path(chosen)] if chosen else []
    roots.append(cache_root() / "data")
    inside = [Path(data_set.name), *(Path(data_set.name, sub) for sub in data_set.subfolders)]
    return [root / sub for root in roots for sub in (*inside, Path())]


def find_files(data_set: DataSetSpec) -> FoundFiles:
    """The best form in the first place that holds a whole one.

    Raises DataMissing with what is missing, every place looked in and how to get it.
    """
    for place in search_folders(data_set):
        for form in data_set.formats:
            paths = {name: _matching_files(place, name) for name in form.files}
            if all(paths.values()):
                return FoundFiles(format=form, paths=paths)
    raise DataMissing(_missing_message(data_set))


def _matching_files(folder: Path, name: str) -> list[Path]:
    plain = [path for path in sorted(folder.glob(name)) if path.is_file()]
    return plain or [path for path in sorted(folder.glob(f"{name}.gz")) if path.is_file()]


def _missing_message(data_set: DataSetSpec) -> str:
    wanted = " or ".join(
        f"{', '.join(form.files)} ({form.description})" for form in data_set.formats
    )
    looked = ", ".join(str(place) for place in search_folders(data_set))
    fetch = ", or set NFOLD_DOWNLOAD=1 to let nfold download it" if data_set.downloads else ""
    return (
        f"data set {data_set.name}: missing {wanted}; looked in {looked}; "
        f"next: {data_set.instructions}{fetch}"
    )


ACCEPT_VARIABLE = "NFOLD_ACCEPT_SHA256"
READ_BYTES = 2**20


def verify_files(files: FoundFiles) -> dict[str, str]:
    """The SHA-256 of every file found, by file name.

    Raises DataCorrupt for a file whose digest is neither the pinned one nor accepted by the
    user in NFOLD_ACCEPT_SHA256, a comma list.
    """
    accepted = {entry.strip().lower() for entry in os.environ.get(ACCEPT_VARIABLE, "").split(",")}
    digests: dict[str, str] = {}
    for name, paths in files.paths.items():
        for path in paths:
            digests[path.name] = _verify_file(path, files.format.files[name], accepted)
    return digests


def _verify_file(path: Path, expected: str, accepted: set[str]) -> str:
    digest = content_sha256(path, expected)
    if digest != expected and digest not in accepted:
        raise DataCorrupt(
            f"{path}: SHA-256{_content_label(path)} is {digest}, expected {expected}; next: get the "
            f"file again, or if it is your own export, set {ACCEPT_VARIABLE}={digest}"
        )
    return digest


def _content_label(path: Path) -> str:
    return " of its unpacked content" if _is_gzipped(path) else ""


def content_sha256(path: Path, expected: str) -> str:
    """SHA-256 of a file's content, unpacked where it is gzipped.

    Raises DataCorrupt, with both digests, for a gzipped file that does not unpack to its end.
    """
    try:
        with open_decompressed(path) as file:
            return _digest(file)
    except DataCorrupt as error:
        raise DataCorrupt(
            f"{error}; the file's own SHA-256 is {file_sha256(path)}, its content's should be "
            f"{expected}; next: get the file again"
        ) from error


def file_sha256(path: Path) -> str:
    """SHA-256 of a file as it lies there."""
    with _translate_errors(path), path.open("rb") as file:
        return _digest(file)


def read_content(path: Path, size_bytes: int) -> bytes:
    """A file's content, unpacked where it is gzipped; DataCorrupt unless it has this size."""
    with open_decompressed(path) as file:
        # One byte more than expected tells too long without unpacking all of it.
        raw = file.read(size_bytes + 1)
    if len(raw) != size_bytes:
        count = f"more than {size_bytes}" if len(raw) > size_bytes else str(len(raw))
        raise DataCorrupt(f"{path}: {count} bytes, expected {size_bytes}")
    return raw


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """A file, through gzip where it is a single gzipped one; an archive is read as it is."""
    with _translate_errors(path), path.open("rb") as file:
        yield cast(IO[bytes], gzip.GzipFile(fileobj=file)) if _is_gzipped(path) else file


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataCorrupt(f"{path}: does not unpack to its end: {error}") from error
    except OSError as error:
        raise MachineUnfit(f"{path}: cannot be read: {error}") from error


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(READ_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _is_gzipped(path: Path) -> bool:
    return path.suffix == ".gz" and not path.name.endswith(".tar.gz")


# Downloading a data set, only when the user says so: NFOLD_DOWNLOAD=1.
#
# A file is written under a temporary name, compared with its pinned size and SHA-256, and renamed:
# under its own name there is never a part of a file, nor another file.

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
