"""What a data set is on a disk: the forms it comes in, their files, where they can be had."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
