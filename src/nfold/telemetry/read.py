"""Reading telemetry.csv, also while it is being written."""

from __future__ import annotations

import csv as csv_format
import datetime
from collections.abc import Iterable
from pathlib import Path

from nfold.telemetry.columns import UTC

TAIL_BYTES = 65536

TelemetryRow = dict[str, float | None]


def read_rows(csv: Path) -> list[TelemetryRow]:
    """All whole rows, oldest first; an empty cell is None. No file yet: no rows.

    ``utc`` becomes seconds since 1970. A last line that is still being written is left out.
    """
    try:
        text = csv.read_text()
    except FileNotFoundError:
        return []
    header, *lines = _complete_lines(text) or [""]
    return _parse(header, lines)


def read_latest_row(csv: Path) -> TelemetryRow:
    """The last whole row, at a cost that does not grow with the file; empty where there is none."""
    try:
        with csv.open("rb") as file:
            header = file.readline().decode()
            begin = file.tell()
            end = file.seek(0, 2)
            file.seek(max(begin, end - TAIL_BYTES))
            tail = file.read().decode()
    except FileNotFoundError:
        return {}
    found = _parse(header.strip(), _complete_lines(tail)[-1:])
    return found[0] if found else {}


def _complete_lines(text: str) -> list[str]:
    return text[: text.rfind("\n") + 1].splitlines()


def _parse(header: str, lines: Iterable[str]) -> list[TelemetryRow]:
    names = header.split(",")
    return [
        {name: _number(name, cell) for name, cell in zip(names, cells, strict=True)}
        for cells in csv_format.reader(lines)
    ]


def _number(name: str, cell: str) -> float | None:
    if not cell:
        return None
    return datetime.datetime.fromisoformat(cell).timestamp() if name == UTC else float(cell)
