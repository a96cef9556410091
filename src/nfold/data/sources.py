"""Where photographs come from: folders of files, or shards of Parquet; read one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nfold.errors import DataCorrupt, ExtraMissing

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff")
"""Files that are taken for images; those that are no JPEG are bad ones."""
ROWS_PER_READ = 256
"""Read at a time of a shard."""


@dataclass(frozen=True)
class EncodedImage:
    """An encoded image as it was found: what it is called in messages, its bytes, its label."""

    name: str
    encoded: object
    label: object


class PhotographSource(Protocol):
    """Photographs in a fixed order."""

    @property
    def files(self) -> Sequence[Path]:
        """Every file that they are read from."""

    def __iter__(self) -> Iterator[EncodedImage]:
        """All of them, read when they are asked for."""


@dataclass(frozen=True)
class FolderSource:
    """Files in a folder per class; classes are numbered in the order of their names."""

    files: Sequence[Path]
    labels: Sequence[int]

    def __iter__(self) -> Iterator[EncodedImage]:
        for file, label in zip(self.files, self.labels, strict=True):
            yield EncodedImage(str(file), _read_file(file), label)


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataCorrupt(f"{file}: cannot be read: {error}") from error


def find_folders(root: Path, names: Sequence[str]) -> FolderSource | None:
    """The first of these folders that has folders with images; DataCorrupt where one has none."""
    for name in names:
        classes = [folder for folder in sorted((root / name).glob("*")) if folder.is_dir()]
        found = {folder: _images_in(folder) for folder in classes}
        if any(found.values()):
            empty = [str(folder) for folder, files in found.items() if not files and name]
            if empty:
                raise DataCorrupt(f"{empty[0]}: has no image; next: fill or remove the folder")
            kept = [files for files in found.values() if files]
            return FolderSource(
                [file for files in kept for file in files],
                [label for label, files in enumerate(kept) for _ in files],
            )
    return None


def _images_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)


@dataclass(frozen=True)
class ParquetSource:
    """Parquet files with the columns ``image`` (``bytes``, ``path``) and ``label``."""

    files: Sequence[Path]

    def __iter__(self) -> Iterator[EncodedImage]:
        for file in self.files:
            yield from _read_rows(file)


def find_shards(root: Path, names: Sequence[str]) -> ParquetSource | None:
    """The shards ``train-*.parquet`` in a place, or in its folder ``data``."""
    for name in names:
        for folder in (root, root / "data"):
            files = sorted(folder.glob(f"{name}-*.parquet"))
            if files:
                return ParquetSource(files)
    return None


def _read_rows(file: Path) -> Iterator[EncodedImage]:
    pyarrow, parquet = _import_pyarrow()
    try:
        with parquet.ParquetFile(file) as shard:
            columns = ["image.bytes", "image.path", "label"]
            row = 0
            for batch in shard.iter_batches(ROWS_PER_READ, columns=columns):
                for image, label in zip(*map(_to_list, batch.columns), strict=True):
                    path = f" ({image['path']})" if image and image.get("path") else ""
                    yield EncodedImage(
                        f"{file}: row {row}{path}", (image or {}).get("bytes"), label
                    )
                    row += 1
    except (pyarrow.ArrowException, KeyError, OSError, ValueError) as error:
        raise DataCorrupt(
            f"{file}: not readable as Parquet with image.bytes and label: {error}"
        ) from error


def _to_list(column: Any) -> Any:
    return column.to_pylist()


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ExtraMissing("pyarrow", "images") from None
    return pyarrow, parquet
