"""Field report 5: channels_first against channels_last, as ratios with intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from nfold.comparison import throughput_ratio
from nfold.report import axes
from nfold.report.field import then
from nfold.report.field.base import (
    BLANK,
    NONE,
    Entry,
    FieldReport,
    Rows,
    Sheet,
    about,
    of_workload,
    told,
)
from nfold.report.results import Result
from nfold.report.words import bounds, count, times
from nfold.stats import Interval

FIRST, LAST = "channels_first", "channels_last"
MODELS = ("cnn10", "wide_resnet", "inception_v3", "mnist", "digits")
HEADS = (
    "model",
    "",
    "precision",
    "devices",
    "batch",
    f"{FIRST} [images/s]",
    f"{LAST} [images/s]",
    "first / last",
)

Pair = dict[str, Result]
"""Two cells that differ in their layout alone, by layout."""
Compared = tuple[Pair, Interval | None]
"""Both, and their ratio where both were timed."""


def report(found: Sequence[Result]) -> FieldReport:
    """Images/s of both layouts and their ratio, by model, framework, precision and devices."""
    pairs = [(pair, _ratio(pair)) for pair in _pairs(of_workload(found, *MODELS))]
    return FieldReport(
        name="layout",
        title="channels_first against channels_last",
        then=then.LAYOUT,
        sentences=tuple(_sentences(pairs)),
        sheets=(_table(pairs),),
    )


def _pairs(mine: Sequence[Result]) -> list[Pair]:
    kept = [axis for axis in axes.AXES if axis != "layout"]
    grouped: dict[tuple[Any, ...], Pair] = defaultdict(dict)
    for result in mine:
        key = tuple(axes.value(result.cell.first, axis) for axis in kept)
        grouped[key][str(result.plan.layout)] = result
    both = [pair for pair in grouped.values() if len(pair) == 2]
    return sorted(both, key=_order)


def _order(pair: Pair) -> tuple[str, str, str, int, int]:
    first = pair[FIRST]
    return (*_name(first), first.devices, first.batch)


def _name(result: Result) -> tuple[str, str, str]:
    plan = result.plan
    strategy = "" if plan.strategy == "single" else f", {plan.strategy}"
    named = f"{plan.framework}{strategy}"
    return (str(result.cell.first.workload), named, plan.precision or "")


def _table(pairs: Sequence[Compared]) -> Sheet:
    rows = Rows("images/s of the two layouts and their ratio", HEADS)
    for model, gain in then.LAYOUT_GAINS.items():
        places = map(told, (model, "then: TensorFlow/Keras", "fp32", 1))
        rows.add(*places, BLANK, BLANK, BLANK, told(gain))
    for pair, ratio in pairs:
        first = pair[FIRST]
        model, framework, precision = _name(first)
        places = map(told, (model, f"now: {framework}", precision, first.devices, first.batch))
        rates = [_rate(rows, pair[layout]) for layout in (FIRST, LAST)]
        rows.add(*places, *rates, about(ratio, 2, "×") if ratio else NONE)
    return rows.sheet()


def _rate(rows: Rows, result: Result) -> Entry:
    return about(result.samples_per_s) if result.ok else rows.failed(result)


def _ratio(pair: Pair) -> Interval | None:
    """The throughput of channels_first over that of channels_last."""
    return throughput_ratio(pair[FIRST].cell, pair[LAST].cell)


def _sentences(pairs: Sequence[Compared]) -> list[str]:
    """Which layout wins how often, and the two ends."""
    known = [(pair, ratio) for pair, ratio in pairs if ratio is not None]
    if not known:
        return ["No pair of cells was measured in both layouts."]
    known.sort(key=lambda one: one[1].value)
    sides = [_side(ratio) for _, ratio in known]
    won = f"{LAST} is faster in {sides.count(-1)}, {FIRST} in {sides.count(1)}"
    open_ = sides.count(0)
    said = [f"Of {count(len(known), 'pair')} {won}; in {open_} they are not told apart."]
    ends = [known[0], known[-1]] if len(known) > 1 else [known[0]]
    said += [f"{_place(pair)}: {FIRST} is {_said(ratio)} {LAST}." for pair, ratio in ends]
    return said


def _side(ratio: Interval) -> int:
    """1 where channels_first is faster by its whole interval, -1 where the other one is."""
    low = ratio.value if ratio.low is None else ratio.low
    high = ratio.value if ratio.high is None else ratio.high
    return (low > 1) - (high < 1)


def _said(ratio: Interval) -> str:
    interval = bounds(ratio, 2)
    return f"{times(ratio.value)}{f' ({interval})' if interval else ''}"


def _place(pair: Pair) -> str:
    model, framework, precision = _name(pair[FIRST])
    return f"{model}, {framework}, {precision}, {count(pair[FIRST].devices, 'device')}"
