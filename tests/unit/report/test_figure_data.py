from __future__ import annotations

import math
from typing import Any

import pytest

import measured
import measured_grids
from nfold.analysis.cells import group_cells
from nfold.analysis.comparison import CellResult, compute_results
from nfold.core.measurement import Measurement, RankSamples
from nfold.core.stats import Interval
from nfold.report import chart_data, chart_elements


def of(*made: Measurement) -> list[CellResult]:
    return compute_results(group_cells(made))


def rate(result: CellResult) -> Interval | None:
    return result.samples_per_s


def test_lines_over_the_batch_are_told_apart_by_what_varies() -> None:
    data = chart_data.lines_over_axis(of(*measured_grids.training_grid()), rate)
    assert data is not None
    assert (data.x_axis, data.colour, data.dash, data.shape) == (
        "batch",
        "devices",
        "variant",
        "strategy",
    )
    assert data.values("devices") == ["1 device", "2 devices", "4 devices"]
    assert data.values("variant") == ["channels_first", "channels_last"]
    assert sorted(row["status"] for row in data.failed) == ["hung", "hung", "out of memory"]
    assert all(row["low"] <= row["y"] <= row["high"] for row in data.rows)


def test_with_one_batch_the_devices_are_the_axis() -> None:
    data = chart_data.lines_over_axis(of(*measured_grids.cpu_grid()), rate)
    assert data is not None
    assert data.x_axis == "devices"
    assert [row["x"] for row in data.rows] == ["1 device", "2 devices"]
    assert data.colour is None


def test_with_one_of_both_the_plans_are_the_axis() -> None:
    made = [measured.measurement(precision=precision) for precision in ("fp32", "bf16")]
    data = chart_data.lines_over_axis(of(*made), rate)
    assert data is not None
    assert data.x_axis == "variant"
    assert any("bf16" in row["x"] for row in data.rows)


def test_a_single_cell_is_no_figure() -> None:
    assert chart_data.lines_over_axis(of(measured.measurement()), rate) is None
    assert chart_data.speedup_lines(of(measured.measurement())) is None


def test_every_speedup_line_begins_at_one() -> None:
    made = [
        measured.measurement(batch=batch, devices=devices, rate=1000 * devices**0.9)
        for batch in (128, 512)
        for devices in (1, 2, 4)
    ]
    data = chart_data.speedup_lines(of(*made))
    assert data is not None
    assert data.colour == "batch_name"
    for name in ("batch 128", "batch 512"):
        line = [row for row in data.rows if row["batch_name"] == name]
        assert [row["x"] for row in line] == [1, 2, 4]
        assert line[0]["y"] == 1.0


def losing(*per_rank: tuple[tuple[int, float], ...], **changes: Any) -> Measurement:
    ranks = tuple(
        RankSamples(rank=k, device=f"cuda:{k}", losses=losses) for k, losses in enumerate(per_rank)
    )
    return measured.measurement(ranks=ranks, **changes)


def test_losses_are_means_over_ranks_at_samples_seen() -> None:
    made = losing(((1, 2.0), (2, 1.0)), ((1, 4.0), (2, 1.5), (3, 9.0)), devices=2, batch=10)
    data = chart_data.loss_lines(of(made))
    assert data is not None
    assert [(row["x"], row["y"]) for row in data.rows] == [(10, 3.0), (20, 1.25)]


def test_a_loss_that_is_no_number_is_not_drawn() -> None:
    data = chart_data.loss_lines(of(losing(((1, 2.0), (2, math.nan), (3, math.inf)), batch=10)))
    assert data is not None
    assert [row["y"] for row in data.rows] == [2.0]
    assert chart_data.loss_lines(of(losing(()))) is None


def test_a_strategy_has_the_same_shape_in_every_figure() -> None:
    rows = [{"strategy": name} for name in ("dp", "ddp")]
    for ordered in (rows, rows[::-1]):
        data = chart_data.FigureData(rows=tuple(ordered), x_axis="batch", shape="strategy")
        assert chart_elements.shape_names(data) == ["single", "ddp", "dp"]


def test_few_lines_are_named_at_their_ends_and_many_kinds_in_a_legend() -> None:
    few = chart_data.lines_over_axis(
        of(*[measured.measurement(batch=b, devices=d) for b in (1, 2) for d in (1, 2)]), rate
    )
    many = chart_data.lines_over_axis(of(*measured_grids.training_grid()), rate)
    assert few is not None
    assert many is not None
    assert chart_elements.uses_direct_labels(few)
    assert chart_elements.line_legend(few) == ()
    assert [entry.label for entry in chart_elements.line_legend(many)] == [
        "1 device",
        "2 devices",
        "4 devices",
        "channels_first",
        "channels_last",
        "ddp",
        "dp",
    ]


@pytest.mark.parametrize("colour", ["batch_name", "variant"])
def test_speedups_of_one_batch_are_told_apart_by_plan(colour: str) -> None:
    batches = (128, 256) if colour == "batch_name" else (128,)
    made = [
        measured.measurement(batch=batch, devices=devices, layout=layout)
        for batch in batches
        for devices in (1, 2)
        for layout in ("channels_first", "channels_last")
    ]
    data = chart_data.speedup_lines(of(*made))
    assert data is not None
    assert data.colour == colour
