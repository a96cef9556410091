"""Field report 5: channels_first against channels_last, as ratios with intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from nfold.analysis import cell_labels
from nfold.analysis.comparison import CellResult, throughput_ratio
from nfold.core.format import format_range, format_ratio, pluralize
from nfold.core.stats import Interval
from nfold.fieldreports import sheets
from nfold.fieldreports.sheets import (
    FieldReport,
    Sheet,
    SheetBuilder,
    interval_entry,
    select_workloads,
)

CHANNELS_FIRST, CHANNELS_LAST = "channels_first", "channels_last"
MODEL_ORDER = ("cnn10", "wide_resnet", "inception_v3", "mnist", "digits")
HEADS = (
    *("model", "", "precision", "devices", "batch"),
    *(f"{layout} [images/s]" for layout in (CHANNELS_FIRST, CHANNELS_LAST)),
    "first / last",
)

LayoutPair = dict[str, CellResult]  # two cells that differ in their layout only, by layout
LayoutComparison = tuple[LayoutPair, Interval | None]  # a pair and its ratio, if both were timed


def layout_report(found: Sequence[CellResult]) -> FieldReport:
    """Build the table of images/s of both layouts and their ratio."""
    pairs = [
        (pair, throughput_ratio(pair[CHANNELS_FIRST].cell, pair[CHANNELS_LAST].cell))
        for pair in _pairs(select_workloads(found, *MODEL_ORDER))
    ]
    return FieldReport(
        name="layout",
        title="channels_first against channels_last",
        published_setup=sheets.LAYOUT_SETUP,
        sentences=tuple(_sentences(pairs)),
        sheets=(_table(pairs),),
    )


def _pairs(mine: Sequence[CellResult]) -> list[LayoutPair]:
    kept = [axis for axis in cell_labels.CELL_AXES if axis != "layout"]
    grouped: dict[tuple[Any, ...], LayoutPair] = defaultdict(dict)
    for result in mine:
        key = tuple(cell_labels.axis_value(result.cell.first, axis) for axis in kept)
        grouped[key][str(result.plan.layout)] = result

    def order(pair: LayoutPair) -> tuple[str, str, str, int, int]:
        first = pair[CHANNELS_FIRST]
        return (*_name(first), first.devices, first.batch)

    return sorted((pair for pair in grouped.values() if len(pair) == 2), key=order)


def _name(result: CellResult) -> tuple[str, str, str]:
    plan = result.plan
    strategy = "" if plan.strategy == "single" else f", {plan.strategy}"
    named = f"{plan.framework}{strategy}"
    return (str(result.cell.first.workload), named, plan.precision or "")


def _table(pairs: Sequence[LayoutComparison]) -> Sheet:
    rows = SheetBuilder("images/s of the two layouts and their ratio", HEADS)
    for model, gain in sheets.LAYOUT_GAINS.items():
        rows.add(model, "then: TensorFlow/Keras", "fp32", 1, "", "", "", gain)
    for pair, ratio in pairs:
        first = pair[CHANNELS_FIRST]
        model, framework, precision = _name(first)
        places = (model, f"now: {framework}", precision, first.devices, first.batch)
        rates = [
            interval_entry(one.samples_per_s) if one.succeeded else rows.failure_entry(one)
            for one in (first, pair[CHANNELS_LAST])
        ]
        rows.add(*places, *rates, interval_entry(ratio, 2, "×"))
    return rows.build()


def _sentences(pairs: Sequence[LayoutComparison]) -> list[str]:
    known = [(pair, ratio) for pair, ratio in pairs if ratio is not None]
    if not known:
        return ["No pair of cells was measured in both layouts."]
    known.sort(key=lambda one: one[1].value)
    sides = [_side(ratio) for _, ratio in known]
    won = f"{CHANNELS_LAST} is faster in {sides.count(-1)}, {CHANNELS_FIRST} in {sides.count(1)}"
    undecided = sides.count(0)
    sentences = [f"Of {pluralize(len(known), 'pair')} {won}; {undecided} are within the noise."]
    ends = [known[0], known[-1]] if len(known) > 1 else [known[0]]
    sentences += [
        f"{_place(pair)}: {CHANNELS_FIRST} is {_format_layout_ratio(ratio)} {CHANNELS_LAST}."
        for pair, ratio in ends
    ]
    return sentences


def _side(ratio: Interval) -> int:
    low = ratio.value if ratio.low is None else ratio.low
    high = ratio.value if ratio.high is None else ratio.high
    return (low > 1) - (high < 1)


def _format_layout_ratio(ratio: Interval) -> str:
    interval = format_range(ratio, 2)
    return f"{format_ratio(ratio.value)}{f' ({interval})' if interval else ''}"


def _place(pair: LayoutPair) -> str:
    model, framework, precision = _name(pair[CHANNELS_FIRST])
    return f"{model}, {framework}, {precision}, {pluralize(pair[CHANNELS_FIRST].devices, 'device')}"
