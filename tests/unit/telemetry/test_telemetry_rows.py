from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from nfold.telemetry import telemetry_csv
from nfold.telemetry.telemetry_csv import read_latest_row, read_rows, read_rows_and_damage

HEADER = "monotonic_s,utc,host_cpu_percent\n"
FIRST = "1.5,2026-01-02T03:04:05.000+00:00,50.0\n"
SECOND = "2.5,2026-01-02T03:04:06.000+00:00,\n"
THEN_S = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC).timestamp()


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    return tmp_path / "telemetry.csv"


def test_an_empty_cell_is_none_and_utc_is_in_seconds(csv: Path) -> None:
    csv.write_text(HEADER + FIRST + SECOND)
    assert read_rows(csv) == [
        {"monotonic_s": 1.5, "utc": THEN_S, "host_cpu_percent": 50.0},
        {"monotonic_s": 2.5, "utc": THEN_S + 1, "host_cpu_percent": None},
    ]
    assert read_latest_row(csv) == read_rows(csv)[-1]


@pytest.mark.parametrize("cut", range(1, len(SECOND)))
def test_a_partial_last_line_is_ignored(csv: Path, cut: int) -> None:
    csv.write_text(HEADER + FIRST + SECOND[:cut])
    assert len(read_rows(csv)) == 1
    assert read_latest_row(csv)["monotonic_s"] == 1.5


@pytest.mark.parametrize("text", ["", "monoto", HEADER])
def test_no_rows_yet(csv: Path, text: str) -> None:
    csv.write_text(text)
    assert read_rows(csv) == []
    assert read_latest_row(csv) == {}


@pytest.mark.parametrize(
    "damaged",
    [
        b"2.0,2026-01-02T03:04:05.500+00:00\n",
        b"2.0,2026-01-02T03:04:05.500+00:00,50.0,1\n",
        b"2.0,2026-01-02T03:04:05.500+00:00,\xff\xfe\n",
        b"2.0,2026-01-02,nan\n",
        b"2.0,yesterday,50.0\n",
        b",2026-01-02T03:04:05.500+00:00,50.0\n",
        b"1.0,2026-01-02T03:04:05.500+00:00,50.0\n",
        b"\0\n",
        b"\n",
    ],
)
def test_a_damaged_row_is_skipped_and_counted(csv: Path, damaged: bytes) -> None:
    csv.write_bytes((HEADER + FIRST).encode() + damaged + SECOND.encode())
    rows, count = read_rows_and_damage(csv)
    assert [row["monotonic_s"] for row in rows] == [1.5, 2.5]
    assert count == 1
    csv.write_bytes((HEADER + FIRST).encode() + damaged)
    read_latest_row(csv)


def test_a_damaged_header_leaves_no_rows(csv: Path) -> None:
    csv.write_bytes(b"mono\xffnic_s,utc,host_cpu_percent\n" + FIRST.encode())
    assert read_rows_and_damage(csv) == ([], 1)
    assert read_latest_row(csv) == {}


def test_no_file_yet(csv: Path) -> None:
    assert read_rows(csv) == []
    assert read_latest_row(csv) == {}


def test_the_latest_row_of_a_long_file(csv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_csv, "TAIL_BYTES", 2 * len(FIRST))
    csv.write_text(HEADER + FIRST * 1000 + SECOND)
    assert read_latest_row(csv)["monotonic_s"] == 2.5
