"""The file telemetry.csv: its columns, a reader and a writer.

    monotonic_s                    time of the row on the host's monotonic clock
    utc                            the same time in UTC, ISO 8601
    host_cpu_percent               busy share of all cores of the host
    host_disk_read_bytes_per_s     reads of the host's physical disks
    host_other_load_percent        CPU time of processes outside the run, in % of one core
    gpu{g}_...                     per GPU, g is its index in CUDA's order
    rank{r}_...                    per rank with its descendants

A rate covers the time since the row before. An empty cell means unknown.
"""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from nfold.core.serialization import replace_file

MONOTONIC = "monotonic_s"
UTC = "utc"
HOST_CPU = "host_cpu_percent"
HOST_DISK_READ = "host_disk_read_bytes_per_s"
HOST_OTHER_LOAD = "host_other_load_percent"

UTILISATION = "utilisation_percent"
MEMORY_USED = "memory_used_bytes"
POWER = "power_w"
TEMPERATURE = "temperature_c"
SM_CLOCK = "sm_clock_mhz"
THROTTLE_REASONS = "throttle_reasons"
PCIE_RX = "pcie_rx_bytes_per_s"
PCIE_TX = "pcie_tx_bytes_per_s"
ENERGY = "energy_j"
OTHER_PROCESSES = "other_processes"

RANK_CPU = "cpu_percent"
RANK_RSS = "rss_bytes"

HOST_COLUMNS = (MONOTONIC, UTC, HOST_CPU, HOST_DISK_READ, HOST_OTHER_LOAD)
GPU_COLUMNS = (
    UTILISATION, MEMORY_USED, POWER, TEMPERATURE, SM_CLOCK, THROTTLE_REASONS, PCIE_RX, PCIE_TX,
    ENERGY, OTHER_PROCESSES,
)  # fmt: skip
RANK_COLUMNS = (RANK_CPU, RANK_RSS)


def gpu_column(gpu: int, what: str) -> str:
    return f"gpu{gpu}_{what}"


def rank_column(rank: int, what: str) -> str:
    return f"rank{rank}_{what}"


def column_names(gpus: Iterable[int], ranks: Iterable[int]) -> list[str]:
    per_gpu = [gpu_column(gpu, what) for gpu in sorted(gpus) for what in GPU_COLUMNS]
    per_rank = [rank_column(rank, what) for rank in sorted(ranks) for what in RANK_COLUMNS]
    return [*HOST_COLUMNS, *per_gpu, *per_rank]


TAIL_BYTES = 65536

TelemetryRow = dict[str, float | None]


def read_rows(csv: Path) -> list[TelemetryRow]:
    """Return all valid rows, oldest first, see ``read_rows_and_damage``."""
    return read_rows_and_damage(csv)[0]


def read_rows_and_damage(csv: Path) -> tuple[list[TelemetryRow], int]:
    """Return all valid rows, oldest first, and the number of damaged rows, which are skipped.

    A row is damaged if a cell is missing or unreadable, or if it is not later than the row before.
    An empty cell is None, ``utc`` is in seconds since 1970. A last line without a line break is
    still being written and is ignored. A file that cannot be read has no rows.
    """
    try:
        text = csv.read_text(errors="replace")
    except OSError:
        return [], 0
    header, *lines = _complete_lines(text) or [""]
    return _parse(header, lines)


def read_latest_row(csv: Path) -> TelemetryRow:
    """Return the last row, without reading the whole file; empty if there is no valid row."""
    try:
        with csv.open("rb") as file:
            header = file.readline().decode(errors="replace")
            begin = file.tell()
            end = file.seek(0, 2)
            file.seek(max(begin, end - TAIL_BYTES))
            tail = file.read().decode(errors="replace")
    except OSError:
        return {}
    rows, _ = _parse(header.strip(), _complete_lines(tail)[-1:])
    return rows[0] if rows else {}


def _complete_lines(text: str) -> list[str]:
    return text[: text.rfind("\n") + 1].splitlines()


def _parse(header: str, lines: Sequence[str]) -> tuple[list[TelemetryRow], int]:
    names = header.split(",")
    rows: list[TelemetryRow] = []
    latest_s = -math.inf
    for line in lines:
        try:
            pairs = zip(names, line.split(","), strict=True)
            row = {name: _parse_cell(name, cell) for name, cell in pairs}
        except ValueError:
            continue
        at_s = row.get(MONOTONIC)
        if at_s is not None and at_s > latest_s:
            rows.append(row)
            latest_s = at_s
    return rows, len(lines) - len(rows)


def _parse_cell(name: str, cell: str) -> float | None:
    if not cell:
        return None
    if name == UTC:
        return datetime.datetime.fromisoformat(cell).timestamp()
    value = float(cell)
    if not math.isfinite(value):
        raise ValueError(f"{name} {cell} is not finite")
    return value


CellValue = float | int | str | None


class TelemetryTable:
    """A new CSV file. Every row is written before ``append`` returns."""

    def __init__(self, path: Path, header: list[str]) -> None:
        self._path = path
        self.header = header
        self._file = self._create(path, [])

    def append(self, row: Mapping[str, CellValue]) -> None:
        """Write one row; missing columns are empty, columns that the file lacks are ignored."""
        csv.writer(self._file, lineterminator="\n").writerow(map(_text, map(row.get, self.header)))
        self._file.flush()

    def widen(self, header: list[str]) -> None:
        """Add columns: writes a new file and renames it, so that readers see one or the other."""
        self._file.close()
        with self._path.open(newline="", errors="replace") as file:
            rows = list(csv.DictReader(file))
        self.header = header
        with replace_file(self._path) as temporary:
            self._file = self._create(temporary, rows)

    def close(self) -> None:
        self._file.close()

    def _create(self, path: Path, rows: list[dict[str, str]]) -> TextIO:
        file = path.open("w", newline="")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([row.get(name, "") for name in self.header] for row in rows)
        file.flush()
        return file


def _text(value: CellValue) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
