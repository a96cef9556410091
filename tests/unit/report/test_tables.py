from __future__ import annotations

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


def rows_of(*made: Measurement, compact: bool = False) -> list[dict[str, str]]:
    heads, rows = tables.table_rows(group_cells(made), compact=compact)
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
    heads, _ = tables.table_rows(group_cells([measured.measurement(steps=100)]))
    assert heads == ["devices", "batch", "images/s", "peak memory"]


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
def test_a_failure_stands_in_its_cell_with_its_cause(status: Status) -> None:
    failed = measured.measurement(
        devices=2, status=status, cause=FailureCause(text="this is why", rank=1, step=7), ranks=()
    )
    made = [measured.measurement(), failed]
    _, two = rows_of(*made)
    assert two["images/s"] == f"{STATUS_LABELS[status]}¹"
    assert tables.table_footnotes(group_cells(made)) == ["¹ rank 1, step 7: this is why"]


def test_a_cell_of_which_some_runs_failed_keeps_its_numbers_and_says_so() -> None:
    made = measured_grids.cpu_grid()
    _, two = rows_of(*made)
    assert two["images/s"].startswith("3,9")
    assert two["images/s"].endswith("¹")
    assert tables.table_footnotes(group_cells(made)) == [
        "¹ of 3 runs 1 killed; rank 1 was ended by SIGKILL"
    ]


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
    assert tables.table_footnotes(group_cells(made)) == ["¹ GPU 0 was hot", "² not exchanged"]


def test_weak_scaling_is_told() -> None:
    made = [measured.measurement(batch=64), measured.measurement(batch=128, devices=2)]
    _, two = rows_of(*made)
    assert two["speedup"].endswith("¹")
    assert "weak scaling" in tables.table_footnotes(group_cells(made))[0]


def test_lines_are_ordered_as_the_columns_are() -> None:
    made = [
        measured.measurement(batch=batch, devices=devices)
        for batch, devices in ((512, 2), (128, 4), (512, 1), (128, 1))
    ]
    heads, rows = tables.table_rows(group_cells(made))
    assert heads[:2] == ["batch", "devices"]
    assert [row[:2] for row in rows] == [["128", "1"], ["128", "4"], ["512", "1"], ["512", "2"]]


def test_a_compact_table_fits_a_terminal(training: Path) -> None:
    found = group_cells(load_measurements(training))
    heads, rows = tables.table_rows(found, compact=True)
    widths = [max(len(line[k]) for line in [heads, *rows]) for k in range(len(heads))]
    assert sum(widths) + 3 * (len(heads) - 1) <= 100
    assert "images/s" in heads
    assert "speedup" in heads


def test_what_all_cells_have_is_named_once() -> None:
    made = [measured.measurement(precision="bf16"), measured.measurement(precision="bf16", batch=9)]
    found = group_cells(made)
    heads, _ = tables.table_rows(found)
    assert "precision" not in heads
    assert "precision bf16" in tables.shared_line(found)


def test_no_cells_make_no_table() -> None:
    assert tables.table_rows([]) == ([], [])
    assert tables.table_footnotes([]) == []
    assert tables.shared_line([]) == ""


def test_hostile_causes_are_inert_text() -> None:
    cause = FailureCause(text="</script>\x1b[31m\n| a |")
    failed = measured.measurement(status="crashed", cause=cause, ranks=())
    assert tables.table_footnotes(group_cells([failed])) == ["¹ </script>\\x1b[31m | a |"]


def test_groups_begin_where_more_than_the_devices_changes(training: Path) -> None:
    made = tables.build_table(compute_results(group_cells(load_measurements(training))))
    batches = [(line.places[0], line.places[1]) for line in made.lines]
    begins = [line.group for line in made.lines]
    assert begins == [False, *(a != b for a, b in pairwise(batches))]
