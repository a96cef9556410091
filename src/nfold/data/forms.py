"""The forms in which a data set lies on a disk: finding their files, checking their digests."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from nfold.data.arrays import Arrays
from nfold.errors import DataCorrupt, DataMissing

ACCEPT = "NFOLD_ACCEPT_SHA256"
CHUNK = 2**20

Decode = Callable[[Mapping[str, Path]], Arrays]


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form: its files by name, each with the SHA-256 that it must have.

    A file may lie there gzipped, under its name with ``.gz``; its digest is the content's, for
    two gzips of the same content differ. ``files`` may be empty: then nothing is needed.
    """

    title: str
    files: Mapping[str, str]
    decode: Decode


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set's forms, best first, and in words how a user gets it."""

    name: str
    forms: Sequence[Form]
    get: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """A form whose files are all there, with their verified digests."""

    form: Form
    paths: Mapping[str, Path]
    digest: str
    """SHA-256 over all files' digests."""


def places(name: str) -> list[Path]:
    """Where a data set is looked for, in order."""
    chosen = os.environ.get("NFOLD_DATA")
    roots = [Path(chosen)] if chosen else []
    roots.append(cache_root() / "data")
    return [place for root in roots for place in (root / name, root)]


def cache_root() -> Path:
    """NFOLD_CACHE, or ``~/.cache/nfold``."""
    chosen = os.environ.get("NFOLD_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "nfold"


def find(data_set: DataSet) -> Found:
    """The best form that is whole in one place, verified.

    Raises DataMissing with what is missing and every place looked in, or DataCorrupt with the
    file and both checksums.
    """
    for form in data_set.forms:
        for place in places(data_set.name):
            paths = {name: _locate(place, name) for name in form.files}
            present = {name: path for name, path in paths.items() if path is not None}
            if len(present) == len(form.files):
                return _verified(form, present)
    raise DataMissing(_missing(data_set))


def _locate(place: Path, name: str) -> Path | None:
    candidates = (place / name, place / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def _missing(data_set: DataSet) -> str:
    wanted = " or ".join(f"{', '.join(form.files)} ({form.title})" for form in data_set.forms)
    looked = ", ".join(str(place) for place in places(data_set.name))
    return f"data set {data_set.name}: missing {wanted}; looked in {looked}; next: {data_set.get}"


def _verified(form: Form, paths: Mapping[str, Path]) -> Found:
    accepted = {entry.strip().lower() for entry in os.environ.get(ACCEPT, "").split(",")}
    digests = {name: sha256(path) for name, path in sorted(paths.items())}
    for name, found in digests.items():
        expected = form.files[name]
        if found != expected and found not in accepted:
            raise DataCorrupt(
                f"{paths[name]}: SHA-256 is {found}, expected {expected}; next: get the file "
                f"again, or if it is your own export, set {ACCEPT}={found}"
            )
    whole = hashlib.sha256("".join(digests.values()).encode()).hexdigest()
    return Found(form=form, paths=paths, digest=whole)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, of what is inside for ``.gz``; DataCorrupt if unreadable."""
    digest = hashlib.sha256()
    try:
        with _opened(path) as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except (OSError, EOFError, zlib.error) as error:
        raise DataCorrupt(f"{path}: cannot be read to its end: {error}") from error
    return digest.hexdigest()


def content(path: Path) -> bytes:
    """A file's content, unpacked where it is gzipped."""
    with _opened(path) as file:
        return file.read()


def _opened(path: Path) -> IO[bytes]:
    """A file, read through gzip where it is a single gzipped one; an archive is read as it is."""
    if path.suffix == ".gz" and not path.name.endswith(".tar.gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")
