from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

import measured
import measured_grids
from nfold.analysis.cells import group_cells
from nfold.analysis.comparison import compute_results
from nfold.analysis.sections import load_measurements
from nfold.core.format import STATUS_LABELS
from nfold.core.measurement import STATUSES, Caveat, FailureCause, Measurement, Status
from nfold.report import tables


def table_of(made: Sequence[Measurement]) -> tables.CellTable:
    return tables.build_table(compute_results(group_cells(made)))


def rows_of(*made: Measurement) -> list[dict[str, str]]:
    heads, rows = tables.flatten_table(table_of(made))
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_a_row_has_the_plan_that_varies_and_every_number() -> None:
    one, two = rows_of(
        measured.measurement(epochs=3, energy_joules=50.0),
        measured.measurement(rate=1830, epochs=3, devices=2, energy_joules=50.0),
    )
    assert list(one) == [
        "devices",
        "epoch 1 [s]",
        "median of epochs 2+ [s]",
        "training time",
        "accuracy",
        "images/s",
        "speedup",
        "efficiency",
        "peak memory",
        "J per 1,000 samples",
    ]
    assert (one["devices"], one["speedup"], one["efficiency"]) == ("1", "1", "–")
    assert two["speedup"].startswith("1.8")
    assert "–" in two["images/s"]
    assert two["peak memory"] == "1.25 GiB"
    assert one["training time"].startswith("0:02:3")


def test_columns_without_any_number_are_left_out() -> None:
    heads, _ = tables.flatten_table(table_of([measured.measurement(steps=100)]))
    assert heads == ["devices", "batch", "images/s", "peak memory"]


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
def test_a_failure_stands_in_its_cell_with_its_cause(status: Status) -> None:
    failed = measured.measurement(
        devices=2, status=status, cause=FailureCause(text="this is why", rank=1, step=7), ranks=()
    )
    made = [measured.measurement(), failed]
    _, two = rows_of(*made)
    assert two["images/s"] == f"{STATUS_LABELS[status]}¹"
    assert table_of(made).notes == ("rank 1, step 7: this is why",)


def test_a_cell_of_which_some_runs_failed_keeps_its_numbers_and_says_so() -> None:
    made = measured_grids.cpu_grid()
    _, two = rows_of(*made)
    assert two["images/s"].startswith("3,9")
    assert two["images/s"].endswith("¹")
    assert table_of(made).notes == ("of 3 runs: 1 killed; rank 1 was ended by SIGKILL",)


def test_the_same_warning_is_one_note_beside_every_number_it_touches() -> None:
    warm = (Caveat(kind="throttled", text="GPU 0 was hot"),)
    apart = (Caveat(kind="parameters_differ", text="not exchanged"),)
    made = [
        measured.measurement(epochs=2, doubts=warm),
        measured.measurement(epochs=2, devices=2, doubts=warm + apart),
    ]
    one, two = rows_of(*made)
    assert one["images/s"].endswith("¹")
    assert two["images/s"].endswith("¹")
    assert two["accuracy"].endswith("²")
    assert table_of(made).notes == (
        "GPU 0 was hot",
        "not exchanged",
    )


def test_weak_scaling_is_told() -> None:
    made = [measured.measurement(batch=64), measured.measurement(batch=128, devices=2)]
    _, two = rows_of(*made)
    assert two["speedup"].endswith("¹")
    assert "weak scaling" in table_of(made).notes[0]


def test_lines_are_ordered_as_the_columns_are() -> None:
    made = [
        measured.measurement(batch=batch, devices=devices)
        for batch, devices in ((512, 2), (128, 4), (512, 1), (128, 1))
    ]
    heads, rows = tables.flatten_table(table_of(made))
    assert heads[:2] == ["batch", "devices"]
    assert [row[:2] for row in rows] == [["128", "1"], ["128", "4"], ["512", "1"], ["512", "2"]]


def test_what_all_cells_have_is_named_once() -> None:
    made = [measured.measurement(precision="bf16"), measured.measurement(precision="bf16", batch=9)]
    heads, _ = tables.flatten_table(table_of(made))
    assert "precision" not in heads
    assert ("precision", "bf16") in table_of(made).shared


def test_hostile_causes_are_inert_text() -> None:
    cause = FailureCause(text="</script>\x1b[31m\n| a |")
    failed = measured.measurement(status="crashed", cause=cause, ranks=())
    assert table_of([failed]).notes == ("</script>\\x1b[31m | a |",)


def test_groups_begin_where_more_than_the_devices_changes(training: Path) -> None:
    made = tables.build_table(compute_results(group_cells(load_measurements(training))))
    batches = [(line.places[0], line.places[1]) for line in made.lines]
    begins = [line.group for line in made.lines]
    assert begins == [False, *(a != b for a, b in pairwise(batches))]
