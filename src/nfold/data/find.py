"""Where a data set is looked for: the chosen folder first, then nfold's own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nfold.data.forms import DataSetFormat, DataSetSpec, Paths
from nfold.errors import DataMissing


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
    """The files of a name or pattern, in their order; else their gzipped forms."""
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
