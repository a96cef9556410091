"""The result columns of the table of cells: what each shows, and how much it matters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nfold.report.results import CellResult
from nfold.report.words import (
    format_bytes,
    format_duration,
    format_half_width,
    format_number,
    format_percent,
    format_range,
    format_ratio,
    scale_interval,
)
from nfold.stats import Interval


@dataclass(frozen=True, kw_only=True)
class FormattedValue:
    """A number as text, and its interval: ``about`` in full, ``spread`` in short."""

    value: str
    about: str = ""
    spread: str = ""


@dataclass(frozen=True, kw_only=True)
class ResultColumn:
    """One column. ``weight`` orders what a narrow table gives up first: the lightest.

    ``spans`` tells whether the reason of a failed cell may be written across this column.
    ``doubts`` are the kinds of warning that touch this number rather than the throughput.
    """

    key: str
    head: str
    short: str
    format: Callable[[CellResult], FormattedValue | None]
    weight: int
    spans: bool = True
    caveat_kinds: tuple[str, ...] = ()


def _seconds(seconds: float | None) -> FormattedValue | None:
    return None if seconds is None else FormattedValue(value=format_number(seconds))


def _with_bounds(interval: Interval | None, places: int | None = None) -> FormattedValue | None:
    if interval is None:
        return None
    return FormattedValue(
        value=format_number(interval.value, places),
        about=format_range(interval, places),
        spread=format_half_width(interval, places),
    )


def _training(result: CellResult) -> FormattedValue | None:
    seconds = result.training_s
    return None if seconds is None else FormattedValue(value=format_duration(seconds))


def _speedup(result: CellResult) -> FormattedValue | None:
    if result.comparison is None:
        return FormattedValue(value="1") if result.is_baseline else None
    speedup = result.comparison.speedup
    return FormattedValue(
        value=format_ratio(speedup.value),
        about=format_range(speedup, 2),
        spread=format_half_width(speedup, 2),
    )


def _efficiency(result: CellResult) -> FormattedValue | None:
    if result.comparison is None:
        return None
    efficiency = result.comparison.efficiency
    in_percent = scale_interval(efficiency, 100)
    return FormattedValue(value=format_percent(efficiency.value), about=format_range(in_percent, 0))


def _memory(result: CellResult) -> FormattedValue | None:
    held = result.peak_memory_bytes
    return None if held is None else FormattedValue(value=format_bytes(held))


RESULT_COLUMNS = (
    ResultColumn(
        key="first_epoch_s",
        head="epoch 1 [s]",
        short="epoch 1 [s]",
        format=lambda r: _seconds(r.first_epoch_s),
        weight=3,
    ),
    ResultColumn(
        key="later_epochs_s",
        head="median of epochs 2+ [s]",
        short="epochs 2+ [s]",
        format=lambda r: _seconds(r.later_epochs_s),
        weight=5,
    ),
    ResultColumn(
        key="training_s", head="training time", short="training", format=_training, weight=4
    ),
    ResultColumn(
        key="accuracy",
        head="accuracy",
        short="accuracy",
        format=lambda r: _with_bounds(r.accuracy, 4),
        weight=6,
        caveat_kinds=("parameters_differ",),
    ),
    ResultColumn(
        key="samples_per_s",
        head="images/s",
        short="images/s",
        format=lambda r: _with_bounds(r.samples_per_s),
        weight=10,
    ),
    ResultColumn(key="speedup", head="speedup", short="speedup", format=_speedup, weight=9),
    ResultColumn(
        key="efficiency", head="efficiency", short="efficiency", format=_efficiency, weight=8
    ),
    ResultColumn(
        key="peak_memory_bytes",
        head="peak memory",
        short="memory",
        format=_memory,
        weight=2,
        spans=False,
    ),
    ResultColumn(
        key="joules_per_1000",
        head="J per 1,000 samples",
        short="J/1,000",
        format=lambda r: _seconds(r.joules_per_1000),
        weight=1,
        spans=False,
    ),
)

MAIN_COLUMN = "samples_per_s"
"""The column that is always there: warnings and failures without a column of their own go there."""
