from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

import measured
from nfold.analysis import sections
from nfold.core.measurement import Caveat, FailureCause, Measurement
from nfold.report import export as csv_form


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def cells_of(*made: Measurement) -> list[dict[str, str]]:
    return rows_of(csv_form.cells_csv(sections.group_sections(made)))


def test_a_row_has_the_plan_and_unrounded_numbers_with_intervals() -> None:
    one, two = cells_of(
        measured.measurement(rate=1000), measured.measurement(rate=1830.0, devices=2, repeat=0)
    )
    assert (two["devices"], two["batch"], two["strategy"]) == ("2", "128", "ddp")
    assert float(two["samples_per_s_low"]) < float(two["samples_per_s"])
    step_s = float(two["step_ms"]) / 1e3
    assert step_s == pytest.approx(128 / float(two["samples_per_s"]), rel=0.01)
    assert float(two["step_ms_low"]) < float(two["step_ms"]) < float(two["step_ms_high"])
    assert float(two["speedup"]) == pytest.approx(1.83, rel=0.03)
    assert float(two["efficiency"]) == pytest.approx(float(two["speedup"]) / 2)
    assert two["baseline_cell"] == one["cell"]
    assert one["speedup"] == ""


def test_a_failure_is_a_row_with_its_cause() -> None:
    cause = FailureCause(text="no memory", rank=1)
    (row,) = cells_of(measured.measurement(status="oom", cause=cause, ranks=()))
    assert (row["status"], row["cause"], row["samples_per_s"]) == ("oom", "rank 1: no memory", "")


def test_parts_are_rows_of_their_own(mixed: Path) -> None:
    rows = rows_of(
        csv_form.part_timings_csv(sections.group_sections(sections.load_measurements(mixed)))
    )
    assert len(rows) == 3 * 9 + 3
    (scipy,) = [row for row in rows if row["part"].startswith("scipy.signal")]
    assert (scipy["baseline"], scipy["where"]) == ("True", "without the devices")
    assert float(scipy["ms"]) == pytest.approx(138, rel=0.05)
    assert csv_form.part_timings_csv(sections.group_sections([measured.measurement()])) == ""


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_no_text_is_a_formula(text: str) -> None:
    (row,) = cells_of(measured.measurement(doubts=(Caveat(kind="x", text=text),)))
    assert row["warnings"] == f"'{text}"


def test_a_line_break_in_a_text_breaks_no_row() -> None:
    cause = FailureCause(text='a\nb,"c"\x1b[31m')
    (row,) = cells_of(measured.measurement(status="crashed", cause=cause, ranks=()))
    assert row["cause"] == 'a b,"c"\\x1b[31m'
