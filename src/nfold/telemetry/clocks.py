"""How fast a GPU's clock was while its rank was timed, and what held it back."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

from nfold.measurement import RankSamples, Window
from nfold.stats import median
from nfold.telemetry import columns
from nfold.telemetry.derive import POWER_CAP_BIT, THROTTLE_BITS
from nfold.telemetry.read import TelemetryRow, read_rows

CLOCK_LIMITS = {POWER_CAP_BIT: "at its power limit", **THROTTLE_BITS}


def with_clocks(
    csv: Path, ranks: Sequence[RankSamples], devices: Sequence[int]
) -> tuple[RankSamples, ...]:
    """The ranks, every window with the clock of its GPU by the rows that were taken in it.

    Rank k has GPU ``devices[k]``. A clock is read at one moment: a row speaks
    for that, not for the time since the row before.
    """
    found = read_rows(csv)
    times = [row[columns.MONOTONIC] or 0.0 for row in found]
    return tuple(_clocked(rank, devices[rank.rank], found, times) for rank in ranks)


def _clocked(
    rank: RankSamples, gpu: int, found: Sequence[TelemetryRow], times: Sequence[float]
) -> RankSamples:
    windows = tuple(_of_window(window, gpu, found, times) for window in rank.windows)
    return dataclasses.replace(rank, windows=windows)


def _of_window(
    window: Window, gpu: int, found: Sequence[TelemetryRow], times: Sequence[float]
) -> Window:
    first = bisect_left(times, window.start_s)
    own = found[first : bisect_right(times, window.start_s + window.seconds)]
    clock, why = (
        columns.gpu_column(gpu, name) for name in (columns.SM_CLOCK, columns.THROTTLE_REASONS)
    )
    said = [(mhz, int(row.get(why) or 0)) for row in own if (mhz := row.get(clock)) is not None]
    if not said:
        return window
    masks = [mask for _, mask in said]
    return dataclasses.replace(
        window, clock_mhz=median([mhz for mhz, _ in said]), throttle_reason=_clock_limit(masks)
    )


def _clock_limit(masks: Sequence[int]) -> str:
    """What held the clock back in half of the rows, or more."""
    often = (
        text
        for bit, text in CLOCK_LIMITS.items()
        if 2 * sum(bool(m & bit) for m in masks) >= len(masks)
    )
    return "; ".join(often)
