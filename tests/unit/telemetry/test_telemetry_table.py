from __future__ import annotations

from pathlib import Path

from nfold.telemetry.telemetry_csv import TelemetryTable, read_rows


def test_it_begins_with_the_header_and_every_row_is_there_at_once(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    table = TelemetryTable(file, ["monotonic_s", "a", "b"])
    assert file.read_text() == "monotonic_s,a,b\n"
    table.append({"b": 2, "monotonic_s": "1.000001", "unknown": 9})
    assert file.read_text() == "monotonic_s,a,b\n1.000001,,2\n"
    table.append({"a": 0.12345, "b": None})
    assert file.read_text().splitlines()[-1] == ",0.123,"
    table.close()


def test_more_columns_keep_the_rows_that_are_there(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    table = TelemetryTable(file, ["monotonic_s", "a"])
    table.append({"monotonic_s": 1, "a": 5})
    reader = file.open()
    table.widen(["monotonic_s", "a", "b"])
    table.append({"monotonic_s": 2, "b": 7})
    table.close()
    assert read_rows(file) == [
        {"monotonic_s": 1.0, "a": 5.0, "b": None},
        {"monotonic_s": 2.0, "a": None, "b": 7.0},
    ]
    assert reader.read() == "monotonic_s,a\n1,5\n", "a reader of the old file sees it whole"
    reader.close()
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_more_columns_keep_the_rows_around_a_damaged_one(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    table = TelemetryTable(file, ["monotonic_s", "a"])
    table.append({"monotonic_s": 1, "a": 5})
    with file.open("ab") as damaged:
        damaged.write(b"\xff\xfe,\0,3,4\n")
    table.widen(["monotonic_s", "a", "b"])
    table.append({"monotonic_s": 2, "b": 7})
    table.close()
    assert [row["monotonic_s"] for row in read_rows(file)] == [1.0, 2.0]
