"""Derived numbers, against what a reader computes by hand from a few raw samples."""

from __future__ import annotations

import json

import pytest

from nfold.analysis import cells
from nfold.analysis.cells import Cell, group_cells
from nfold.core.measurement import Caveat, Epoch, FailureCause, OperationPart
from nfold.core.stats import Interval, median
from timed import rank, timed


def epoch(seconds: float, accuracy: float | None = None) -> Epoch:
    return Epoch(seconds=seconds, samples=1000, train_loss=0.5, accuracy=accuracy)


def test_repeats_are_grouped_in_order_of_appearance() -> None:
    one, two = timed([1.0], repeat=0), timed([1.0], repeat=1)
    other = timed([1.0], batch=32)
    found = group_cells([one, other, two])
    assert [cell.measurements for cell in found] == [(one, two), (other,)]
    assert found[0].first is one


def test_a_cell_shows_its_failure_and_counts_successes() -> None:
    good = timed([1.0])
    bad = timed(repeat=1, status="oom", cause=FailureCause(text="no room"))
    cell = Cell(measurements=(good, bad))
    assert cell.successful == (good,)
    assert cell.first_failed_or_first is bad
    assert Cell(measurements=(good,)).first_failed_or_first is good


def test_the_rate_of_a_window_is_all_samples_over_the_slowest_rank() -> None:
    assert cells.window_rates(timed([1.0, 2.0], [4.0, 1.0])) == [200 / 4.0, 200 / 2.0]
    assert cells.window_rates(timed()) == []
    assert cells.window_rates(timed([1.0], [])) == [100.0]


def test_throughput_is_the_median_over_windows_and_repeats() -> None:
    cell = Cell(measurements=(timed([1.0, 2.0]), timed([4.0, 1.0, 1.0], repeat=1)))
    found = cells.samples_per_s(cell)
    assert found is not None
    assert found.value == 100.0
    assert found.low is not None
    assert found.high is not None
    assert 25.0 <= found.low <= 100.0 <= found.high


def test_a_failed_repeat_gives_no_rate() -> None:
    failed = timed([0.001], status="diverged")
    assert cells.samples_per_s(Cell(measurements=(failed,))) is None
    assert cells.step_ms(Cell(measurements=(failed,))) is None
    assert cells.rate_groups(Cell(measurements=(failed, timed([1.0])))) == [[100.0]]


def test_a_step_takes_as_long_as_the_slowest_rank() -> None:
    found = cells.step_ms(Cell(measurements=(timed([1.0, 1.0], [2.0, 2.0], batch=20),)))
    assert found == Interval(200.0, 200.0, 200.0)


def test_the_first_step_is_the_slowest_rank_s() -> None:
    ranks = (rank(0, first_step_ms=0.0), rank(1), rank(2, first_step_ms=7.5))
    assert cells.first_step_ms(timed(ranks=ranks)) == 7.5
    assert cells.first_step_ms(timed(ranks=ranks[:1])) == 0.0
    assert cells.first_step_ms(timed(ranks=ranks[1:2])) is None


def test_first_and_later_epochs_are_separate() -> None:
    """First 5 s and 7 s; later 2, 3 and 4, 4; in all 10 and 15."""
    one = timed(ranks=(rank(epochs=(epoch(5.0), epoch(2.0), epoch(3.0, 0.8))),))
    two = timed(ranks=(rank(epochs=(epoch(7.0), epoch(4.0), epoch(4.0, 0.9))),), repeat=1)
    cell = Cell(measurements=(one, two))
    assert cells.first_epoch_s(cell) == 6.0
    assert cells.later_epochs_s(cell) == 3.5
    assert cells.total_epoch_s(cell) == 12.5
    assert cells.accuracy(cell) == Interval(median([0.8, 0.9]), 0.8, 0.9)
    assert cells.accuracy(Cell(measurements=(one,))) == Interval(0.8)


def test_without_epochs_there_is_no_epoch_and_no_accuracy() -> None:
    cell = Cell(measurements=(timed([1.0]),))
    assert cells.epochs(timed()) == ()
    assert cells.first_epoch_s(cell) is None
    assert cells.later_epochs_s(cell) is None
    assert cells.total_epoch_s(cell) is None
    assert cells.accuracy(cell) is None


def test_one_epoch_has_no_later_ones_and_may_not_be_evaluated() -> None:
    cell = Cell(measurements=(timed(ranks=(rank(epochs=(epoch(5.0),)),)),))
    assert cells.first_epoch_s(cell) == cells.total_epoch_s(cell) == 5.0
    assert cells.later_epochs_s(cell) is None
    assert cells.accuracy(cell) is None


def test_peak_memory_is_the_most_of_any_rank_also_of_a_failure() -> None:
    small = timed(ranks=(rank(0, peak_memory_bytes=10), rank(1, peak_memory_bytes=20)))
    failed = timed(ranks=(rank(0, peak_memory_bytes=99),), status="oom")
    assert cells.peak_memory_bytes(Cell(measurements=(small,))) == 20
    assert cells.peak_memory_bytes(Cell(measurements=(small, failed))) == 99
    assert cells.peak_memory_bytes(Cell(measurements=(timed(),))) is None


def test_energy_is_per_thousand_samples_of_the_timed_windows() -> None:
    cell = Cell(measurements=(timed([1.0, 1.0], [1.0, 1.0], energy_joules=40.0),))
    assert cells.joules_per_1000(cell) == pytest.approx(100.0)
    assert cells.joules_per_1000(Cell(measurements=(timed([1.0]),))) is None
    assert cells.joules_per_1000(Cell(measurements=(timed(energy_joules=40.0),))) is None


def test_json_of_a_measurement_has_the_promised_keys() -> None:
    ranks = (
        rank(
            0,
            [1.0],
            epochs=(epoch(5.0, 0.8),),
            peak_memory_bytes=5,
            data_bytes=3,
            first_step_ms=3.0,
        ),
        rank(1, [1.0], parts=(OperationPart(name="copy", seconds=(0.5,), images=8),)),
    )
    caveat = Caveat(kind="drift", text="slower")
    made = timed(
        batch=20, ranks=ranks, warnings=(caveat,), folder="measurements/made", energy_joules=2.0
    )
    written = json.loads(json.dumps(cells.measurement_json(made)))
    assert written["id"] == "made"
    assert written["workload"] == "digits"
    assert written["plan"] == made.plan.to_dict()
    assert (written["status"], written["cause"]) == ("ok", None)
    assert written["samples_per_s"] == {"value": 200.0, "low": None, "high": None}
    assert written["step_ms"] == {"value": 100.0, "low": None, "high": None}
    assert written["first_step_ms"] == 3.0
    assert written["epochs"] == [{"seconds": 5.0, "train_loss": 0.5, "accuracy": 0.8}]
    assert written["peak_memory_bytes"] == [5, None]
    assert (written["data_bytes"], written["graph_bytes"]) == ([3, None], [None, None])
    assert written["energy_joules"] == 2.0
    assert written["telemetry"] == "measurements/made/telemetry.csv"
    assert written["warnings"] == [{"kind": "drift", "text": "slower", "value": None}]
    assert written["parts"][0]["name"] == "copy"


def test_json_of_a_failure_keeps_its_cause_and_has_no_rate() -> None:
    failed = timed(status="killed", cause=FailureCause(text="gone", rank=1, signal=9))
    written = cells.measurement_json(failed)
    assert written["cause"] == {
        "text": "gone",
        "rank": 1,
        "step": None,
        "signal": 9,
        "stalled_s": None,
        "out_of_step": False,
    }
    assert written["samples_per_s"] is None
    assert written["telemetry"] is None
