"""Data sets on disk: file formats, search folders, checksums, downloads."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import logging
import os
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from nfold.core.errors import DataCorrupt, DataMissing, ExtraMissing, MachineUnfit
from nfold.core.serialization import replace_file
from nfold.data.arrays import DataSetArrays

Paths = Mapping[str, Sequence[Path]]  # the files of each name; several only for a pattern
Decode = Callable[[Paths], DataSetArrays]


@dataclass(frozen=True, kw_only=True)
class DataSetFormat:
    """One format: file names or patterns (``train-*.parquet``), each with its SHA-256.

    A file may be gzipped, with ``.gz`` after its name. Its digest is of the unpacked content,
    because gzip files of the same content differ. Empty ``files``: no file is needed.
    """

    description: str
    files: Mapping[str, str]
    decode: Decode


@dataclass(frozen=True, kw_only=True)
class DownloadFile:
    """A file on the network; size and SHA-256 are of the file as sent."""

    url: str
    size_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class DataSetSpec:
    """The formats of a data set in order of preference, and how to get it.

    ``subfolders`` are the folders that the publisher's archives unpack into.
    """

    name: str
    formats: Sequence[DataSetFormat]
    instructions: str
    downloads: Sequence[DownloadFile] = ()
    subfolders: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class FoundFiles:
    format: DataSetFormat
    paths: Paths


def cache_root() -> Path:
    """Return NFOLD_CACHE, or ``~/.cache/nfold``."""
    chosen = os.environ.get("NFOLD_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "nfold"


def download_folder(data_set: DataSetSpec) -> Path:
    return cache_root() / "data" / data_set.name


def data_roots() -> list[Path]:
    chosen = os.environ.get("NFOLD_DATA")
    return [*([Path(chosen)] if chosen else []), cache_root() / "data"]


def search_folders(data_set: DataSetSpec) -> list[Path]:
    """Return the folders that are searched for a data set, in order."""
    inside = [Path(data_set.name), *(Path(data_set.name, sub) for sub in data_set.subfolders)]
    return [root / sub for root in data_roots() for sub in (*inside, Path())]


def find_files(data_set: DataSetSpec) -> FoundFiles:
    """Return the first complete format in the first search folder that has one.

    Raises DataMissing with the missing files, the searched folders and the instructions.
    """
    folders = search_folders(data_set)
    for folder in folders:
        for fmt in data_set.formats:
            paths = {name: _matching_files(folder, name) for name in fmt.files}
            if all(paths.values()):
                return FoundFiles(format=fmt, paths=paths)
    missing = " or ".join(f"{', '.join(fmt.files)} ({fmt.description})" for fmt in data_set.formats)
    fetch = ", or set NFOLD_DOWNLOAD=1 to let nfold download it" if data_set.downloads else ""
    raise DataMissing(
        f"data set {data_set.name}: missing {missing}; looked in {', '.join(map(str, folders))}; "
        f"next: {data_set.instructions}{fetch}"
    )


def _matching_files(folder: Path, name: str) -> list[Path]:
    uncompressed = [path for path in sorted(folder.glob(name)) if path.is_file()]
    return uncompressed or [path for path in sorted(folder.glob(f"{name}.gz")) if path.is_file()]


ACCEPT_VARIABLE = "NFOLD_ACCEPT_SHA256"
READ_BYTES = 2**20
PARQUET_ROWS = 256  # per read


def verify_files(files: FoundFiles) -> dict[str, str]:
    """Return the SHA-256 of every file by file name.

    Raises DataCorrupt for a digest that is neither the expected one nor in the comma-separated
    list NFOLD_ACCEPT_SHA256.
    """
    accepted = {entry.strip().lower() for entry in os.environ.get(ACCEPT_VARIABLE, "").split(",")}
    digests: dict[str, str] = {}
    for name, paths in files.paths.items():
        expected = files.format.files[name]
        for path in paths:
            digest = digests[path.name] = content_sha256(path, expected)
            if digest != expected and digest not in accepted:
                content = " of its unpacked content" if _is_gzipped(path) else ""
                raise DataCorrupt(
                    f"{path}: SHA-256{content} is {digest}, expected {expected}; next: get the "
                    f"file again, or if it is your own export, set {ACCEPT_VARIABLE}={digest}"
                )
    return digests


def content_sha256(path: Path, expected: str) -> str:
    """Return the SHA-256 of a file's content, unpacked if it is gzipped.

    Raises DataCorrupt, with both digests, for a truncated or damaged gzip file.
    """
    try:
        with open_decompressed(path) as file:
            return _digest(file)
    except DataCorrupt as error:
        raise DataCorrupt(
            f"{error}; SHA-256 of the file: {file_sha256(path)}, expected of its content: "
            f"{expected}; next: get the file again"
        ) from error


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the file itself, without unpacking."""
    with _translate_errors(path), path.open("rb") as file:
        return _digest(file)


def read_content(path: Path, size_bytes: int) -> bytes:
    """Return a file's content, unpacked if gzipped; raises DataCorrupt for another size."""
    with open_decompressed(path) as file:
        # One byte more than expected detects a longer file without unpacking all of it.
        raw = file.read(size_bytes + 1)
    if len(raw) != size_bytes:
        count = f"more than {size_bytes}" if len(raw) > size_bytes else str(len(raw))
        raise DataCorrupt(f"{path}: {count} bytes, expected {size_bytes}")
    return raw


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, through gzip for ``.gz``; a ``.tar.gz`` archive is not unpacked."""
    with _translate_errors(path), path.open("rb") as file:
        yield cast(IO[bytes], gzip.GzipFile(fileobj=file)) if _is_gzipped(path) else file


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataCorrupt(f"{path}: truncated or damaged gzip file: {error}") from error
    except OSError as error:
        raise MachineUnfit(f"{path}: cannot be read: {error}") from error


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(READ_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _is_gzipped(path: Path) -> bool:
    return path.suffix == ".gz" and not path.name.endswith(".tar.gz")


def read_parquet_rows(
    file: Path, column: str, fields: Sequence[str]
) -> Iterator[tuple[dict[str, Any], object]]:
    """Yield ``fields`` of the image ``column``, and the label, of every row.

    Raises DataCorrupt without these columns, and ExtraMissing without pyarrow.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ExtraMissing("pyarrow", "images") from None
    names = [*(f"{column}.{field}" for field in fields), "label"]
    try:
        # Not read_table: it reads partition columns from a path like /data/label=3/.
        with parquet.ParquetFile(file) as shard:
            for batch in shard.iter_batches(PARQUET_ROWS, columns=names):
                lists = (values.to_pylist() for values in batch.columns)
                for image, label in zip(*lists, strict=True):
                    yield image or {}, label
    except (pyarrow.ArrowException, KeyError, OSError, ValueError) as error:
        raise DataCorrupt(
            f"{file}: not readable as Parquet with {column}.bytes and label: {error}"
        ) from error


# Downloads, only with NFOLD_DOWNLOAD=1. A file is written under a temporary name and renamed after
# its size and SHA-256 were compared.

DOWNLOAD_VARIABLE = "NFOLD_DOWNLOAD"
DOWNLOAD_BYTES = 2**18
DOWNLOAD_TIMEOUT_S = 60  # without receiving a byte

log = logging.getLogger(__name__)


def downloads_allowed() -> bool:
    return os.environ.get(DOWNLOAD_VARIABLE) == "1"


def download_data_set(data_set: DataSetSpec) -> None:
    """Download missing files into nfold's folder; logs every download.

    Raises DataMissing if the network fails, DataCorrupt for an unexpected size or SHA-256,
    MachineUnfit if the file cannot be written.
    """
    folder = download_folder(data_set)
    for download in data_set.downloads:
        if not (folder / download.name).exists():
            log.warning("downloading %s into %s", download.url, folder)
            _download_file(download, folder)


def _download_file(download: DownloadFile, folder: Path) -> None:
    try:
        with replace_file(folder / download.name) as temporary, temporary.open("wb") as file:
            for chunk in _verified_chunks(download):
                file.write(chunk)
    except OSError as error:
        raise MachineUnfit(
            f"{folder} cannot be written: {error}; next: make room there, or set NFOLD_CACHE to "
            "another folder"
        ) from error


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
            f"{download.url}: received {size} of {download.size_bytes} bytes with SHA-256 "
            f"{digest.hexdigest()}, expected {download.sha256}; the file was deleted; "
            "next: try again"
        )


def _received_chunks(url: str) -> Iterator[bytes]:
    try:
        with _http_opener().open(url, timeout=DOWNLOAD_TIMEOUT_S) as response:
            while chunk := response.read(DOWNLOAD_BYTES):
                yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise DataMissing(
            f"{url}: download failed: {error}; next: get the file another way and set NFOLD_DATA "
            "to its folder"
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
