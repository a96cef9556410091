"""Clocks of GPUs, by the rows of telemetry that were taken in a window."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nfold.core.measurement import RankSamples, Window
from nfold.telemetry import telemetry_csv
from nfold.telemetry.evaluation import with_clocks
from nfold.telemetry.telemetry_csv import TelemetryTable

Said = tuple[float | None, int]


def _write(csv: Path, *rows: Sequence[Said]) -> None:
    """A row a second, from 0; of each GPU its clock and the mask of what holds it back."""
    table = TelemetryTable(csv, telemetry_csv.column_names(range(len(rows[0])), ()))
    for second, row in enumerate(rows):
        cells: dict[str, float | None] = {"monotonic_s": second}
        for gpu, (mhz, mask) in enumerate(row):
            cells[telemetry_csv.gpu_column(gpu, "sm_clock_mhz")] = mhz
            cells[telemetry_csv.gpu_column(gpu, "throttle_reasons")] = mask
        table.append(cells)
    table.close()


def _rank(rank: int, *starts: float) -> RankSamples:
    windows = tuple(Window(start_s=at, seconds=1.6, steps=1, samples=1) for at in starts)
    return RankSamples(rank=rank, device="cuda:0 of the rank's own", windows=windows)


def _clocks(ranks: Sequence[RankSamples]) -> list[list[tuple[float | None, str]]]:
    return [
        [(window.clock_mhz, window.throttle_reason) for window in rank.windows] for rank in ranks
    ]


def test_a_window_has_the_clock_that_was_read_in_it(tmp_path: Path) -> None:
    csv = tmp_path / "telemetry.csv"
    _write(csv, *[[(1980, 0), (1700 + 10 * second, 0x04)] for second in range(6)])
    found = with_clocks(csv, [_rank(0, 0.5, 7), _rank(1, 0.9, 2.5)], (0, 1))
    assert _clocks(found) == [
        [(1980.0, ""), (None, "")],
        [(1715.0, "at its power limit"), (1735.0, "at its power limit")],
    ]


def test_a_rank_on_another_device_has_that_ones_clock(tmp_path: Path) -> None:
    csv = tmp_path / "telemetry.csv"
    _write(csv, *[[(1980, 0), (1500, 0x20)] for _ in range(4)])
    found = with_clocks(csv, [_rank(0, 0.5), _rank(1, 0.5)], (1, 0))
    assert _clocks(found) == [[(1500.0, "thermal, by the driver")], [(1980.0, "")]]


def test_a_throttle_reason_in_less_than_half_of_the_rows_is_ignored(tmp_path: Path) -> None:
    csv = tmp_path / "telemetry.csv"
    _write(csv, [(1900, 0x04)], [(1910, 0)], [(1920, 0)])
    long = RankSamples(
        rank=0, device="", windows=(Window(start_s=0, seconds=2, steps=1, samples=1),)
    )
    assert _clocks(with_clocks(csv, [long], (0,))) == [[(1910.0, "")]]


def test_a_gpu_that_does_not_answer_has_no_clock(tmp_path: Path) -> None:
    csv = tmp_path / "telemetry.csv"
    _write(csv, [(None, 0)], [(None, 0)], [(None, 0)])
    assert _clocks(with_clocks(csv, [_rank(0, 0.5)], (0,))) == [[(None, "")]]
    assert _clocks(with_clocks(tmp_path / "none.csv", [_rank(0, 0.5)], (0,))) == [[(None, "")]]
