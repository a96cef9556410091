"""Whether a file is what its pinned SHA-256 says, and reading it without being flooded."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from nfold.data.find import FoundFiles
from nfold.errors import DataCorrupt, MachineUnfit

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
