"""The result columns of the table of cells: what each shows, and how much it matters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nfold.report.results import Result
from nfold.report.words import (
    bounds,
    duration,
    half_width,
    memory,
    number,
    percent,
    scaled,
    times,
)
from nfold.stats import Interval


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A number as text, and its interval: ``about`` in full, ``spread`` in short."""

    value: str
    about: str = ""
    spread: str = ""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column. ``weight`` orders what a narrow table gives up first: the lightest.

    ``spans`` tells whether the reason of a failed cell may be written across this column.
    ``doubts`` are the kinds of warning that touch this number rather than the throughput.
    """

    key: str
    head: str
    short: str
    show: Callable[[Result], Shown | None]
    weight: int
    spans: bool = True
    doubts: tuple[str, ...] = ()


def _seconds(seconds: float | None) -> Shown | None:
    return None if seconds is None else Shown(value=number(seconds))


def _with_bounds(interval: Interval | None, places: int | None = None) -> Shown | None:
    if interval is None:
        return None
    return Shown(
        value=number(interval.value, places),
        about=bounds(interval, places),
        spread=half_width(interval, places),
    )


def _training(result: Result) -> Shown | None:
    seconds = result.training_s
    return None if seconds is None else Shown(value=duration(seconds))


def _speedup(result: Result) -> Shown | None:
    if result.comparison is None:
        return Shown(value="1") if result.baseline else None
    speedup = result.comparison.speedup
    return Shown(
        value=times(speedup.value), about=bounds(speedup, 2), spread=half_width(speedup, 2)
    )


def _efficiency(result: Result) -> Shown | None:
    if result.comparison is None:
        return None
    efficiency = result.comparison.efficiency
    in_percent = scaled(efficiency, 100)
    return Shown(value=percent(efficiency.value), about=bounds(in_percent, 0))


def _memory(result: Result) -> Shown | None:
    held = result.peak_memory_bytes
    return None if held is None else Shown(value=memory(held))


COLUMNS = (
    Column(
        key="first_epoch_s",
        head="epoch 1 [s]",
        short="epoch 1 [s]",
        show=lambda r: _seconds(r.first_epoch_s),
        weight=3,
    ),
    Column(
        key="later_epochs_s",
        head="median of epochs 2+ [s]",
        short="epochs 2+ [s]",
        show=lambda r: _seconds(r.later_epochs_s),
        weight=5,
    ),
    Column(key="training_s", head="training time", short="training", show=_training, weight=4),
    Column(
        key="accuracy",
        head="accuracy",
        short="accuracy",
        show=lambda r: _with_bounds(r.accuracy, 4),
        weight=6,
        doubts=("parameters_differ",),
    ),
    Column(
        key="samples_per_s",
        head="images/s",
        short="images/s",
        show=lambda r: _with_bounds(r.samples_per_s),
        weight=10,
    ),
    Column(key="speedup", head="speedup", short="speedup", show=_speedup, weight=9),
    Column(key="efficiency", head="efficiency", short="efficiency", show=_efficiency, weight=8),
    Column(
        key="peak_memory_bytes",
        head="peak memory",
        short="memory",
        show=_memory,
        weight=2,
        spans=False,
    ),
    Column(
        key="joules_per_1000",
        head="J per 1,000 samples",
        short="J/1,000",
        show=lambda r: _seconds(r.joules_per_1000),
        weight=1,
        spans=False,
    ),
)

MAIN = "samples_per_s"
"""The column that is always there: warnings and failures without a column of their own go there."""
