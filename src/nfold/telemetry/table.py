"""The file that a sampler fills: a header, then one row a sample, whole or not there."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

CellValue = float | int | str | None


class TelemetryTable:
    """A CSV file at ``path``, begun anew. Every row reaches the file before ``append`` returns."""

    def __init__(self, path: Path, header: list[str]) -> None:
        self._path = path
        self.header = header
        self._file = self._create(path, [])

    def append(self, row: Mapping[str, CellValue]) -> None:
        """Write one row; columns that it lacks are empty, columns that the file lacks left out."""
        csv.writer(self._file, lineterminator="\n").writerow(map(_text, map(row.get, self.header)))
        self._file.flush()

    def widen(self, header: list[str]) -> None:
        """Give the file more columns: rewritten aside and renamed, so a reader sees either."""
        self._file.close()
        with self._path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        self.header = header
        aside = self._path.with_name(f".{self._path.name}.new")
        self._file = self._create(aside, rows)
        aside.rename(self._path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _create(self, path: Path, rows: list[dict[str, str]]) -> TextIO:
        file = path.open("w", newline="")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([row.get(name, "") for name in self.header] for row in rows)
        file.flush()
        return file


def _text(value: CellValue) -> str:
    """Three decimals are finer than any of these counters."""
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
