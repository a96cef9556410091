"""Evaluates telemetry: energy, clocks, and caveats of a measurement.

All functions evaluate the rows of a telemetry.csv over a span [start_s, end_s] of the host's
monotonic clock. A row covers the time since the row before it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from nfold.core.measurement import Caveat, RankSamples, Window
from nfold.core.stats import median
from nfold.telemetry import telemetry_csv
from nfold.telemetry.telemetry_csv import (
    TelemetryRow,
    gpu_column,
    read_rows,
    read_rows_and_damage,
)

THROTTLE_BITS = {
    0x08: "hardware slowdown",
    0x20: "thermal, by the driver",
    0x40: "thermal, by the hardware",
    0x80: "power brake",
}  # nvmlClocksEventReasons in nvml.h that mean a fault
POWER_CAP_BIT = 0x04  # power limit reached, which is normal under full load
CLOCK_LIMITS = {POWER_CAP_BIT: "at its power limit", **THROTTLE_BITS}

BUSY_CORE_PERCENT = 20.0  # of one core
BUSY_HOST_PERCENT = 2.0  # of all cores
"""Other load is a caveat above both: the services of an idle machine stay below, a foreign process
that computes uses 40 to 100 % of a core."""
MAX_MISSING_ROWS = 3.0  # intervals between the last row and the end of the span
MIN_COVERAGE = 0.5  # share of the span that points must cover
ESSENTIAL_COLUMNS = (
    telemetry_csv.UTILISATION,
    telemetry_csv.MEMORY_USED,
    telemetry_csv.POWER,
    telemetry_csv.SM_CLOCK,
    telemetry_csv.THROTTLE_REASONS,
)
"""Every data-centre GPU reports these; without them a throttled or idle GPU is not noticed."""

_GPU_COLUMN = re.compile(r"gpu(\d+)_")
TimedValue = tuple[float, float]  # seconds on the monotonic clock, value


@dataclass(frozen=True)
class WeightedRow:
    """A row and the seconds of the span that it covers."""

    row: TelemetryRow
    seconds: float


def energy_joules(csv: Path, start_s: float, end_s: float) -> float | None:
    """Return the energy of all GPUs over the span, None if no GPU reports energy or power."""
    rows = read_rows(csv)
    energies = [gpu_energy_joules(rows, gpu, start_s, end_s) for gpu in _gpus(rows)]
    known = [energy for energy in energies if energy is not None]
    return sum(known) if known else None


def telemetry_caveats(
    csv: Path, start_s: float, end_s: float, *, cores: int | None = None
) -> list[Caveat]:
    """Return the caveats of the span.

    Kinds are ``telemetry_missing``, ``throttled``, ``power_capped``, ``busy_device`` and
    ``busy_host``. ``cores`` is the number of cores of the host, by default of this host.
    """
    rows, damaged = read_rows_and_damage(csv)
    span = weighted_rows(rows, start_s, end_s)
    if not span:
        text = "no telemetry of the timed part: load, energy and throttling are unknown"
        return [_missing(text)]
    caveats = _check_gaps(rows, end_s)
    if damaged:
        text = f"{damaged} damaged rows of {csv.name} were skipped: load and energy are less exact"
        caveats.append(_missing(text))
    for gpu in _gpus(rows):
        for check in (_check_answers, _check_throttling, _check_power_cap, _check_other_processes):
            caveats += check(span, gpu)
    return [*caveats, *_check_busy_host(span, cores or os.cpu_count() or 1)]


def weighted_rows(rows: Sequence[TelemetryRow], start_s: float, end_s: float) -> list[WeightedRow]:
    """Return the rows that cover a part of the span."""
    overlaps = [
        min(_time(row), end_s) - max(_time(before), start_s) for before, row in pairwise(rows)
    ]
    return [
        WeightedRow(row, overlap)
        for row, overlap in zip(rows[1:], overlaps, strict=True)
        if overlap > 0
    ]


def _check_gaps(rows: Sequence[TelemetryRow], end_s: float) -> list[Caveat]:
    first_s, last_s = _time(rows[0]), _time(rows[-1])
    early_s, interval_s = end_s - last_s, (last_s - first_s) / (len(rows) - 1)
    if early_s <= MAX_MISSING_ROWS * interval_s:
        return []
    return [_missing(f"telemetry ended {early_s:.0f} s before the timed part did")]


def _check_answers(span: Sequence[WeightedRow], gpu: int) -> list[Caveat]:
    names = [gpu_column(gpu, what) for what in ESSENTIAL_COLUMNS]
    silent = sum(all(weighted.row.get(name) is None for name in names) for weighted in span)
    if silent == len(span):
        return [_missing(f"GPU {gpu} did not answer: load, energy and throttling are unknown")]
    if silent:
        return [_missing(f"GPU {gpu} did not answer in {silent} of {len(span)} rows")]
    never = [name for name in names if not _column_values(span, name)]
    return [_missing(f"the device does not report {', '.join(never)}")] if never else []


def _check_throttling(span: Sequence[WeightedRow], gpu: int) -> list[Caveat]:
    masks = _masks(span, gpu)
    reasons = [text for bit, text in THROTTLE_BITS.items() if any(mask & bit for mask in masks)]
    if not reasons:
        return []
    count = sum(bool(mask & sum(THROTTLE_BITS)) for mask in masks)
    text = f"GPU {gpu} was throttled in {count} of {len(span)} rows ({'; '.join(reasons)})"
    return [Caveat(kind="throttled", text=text)]


def _check_power_cap(span: Sequence[WeightedRow], gpu: int) -> list[Caveat]:
    count = sum(bool(mask & POWER_CAP_BIT) for mask in _masks(span, gpu))
    text = f"GPU {gpu} ran at its power limit in {count} of {len(span)} rows"
    return [Caveat(kind="power_capped", text=text)] if count else []


def _check_other_processes(span: Sequence[WeightedRow], gpu: int) -> list[Caveat]:
    counts = _column_values(span, gpu_column(gpu, telemetry_csv.OTHER_PROCESSES))
    busy = [count for count in counts if count > 0]
    if not busy:
        return []
    who = "another process was" if max(busy) == 1 else f"{max(busy):.0f} other processes were"
    text = f"{who} on GPU {gpu} in {len(busy)} of {len(span)} rows"
    return [Caveat(kind="busy_device", text=text)]


def _check_busy_host(span: Sequence[WeightedRow], cores: int) -> list[Caveat]:
    loads = [
        (value, weighted.seconds)
        for weighted in span
        if (value := weighted.row.get(telemetry_csv.HOST_OTHER_LOAD)) is not None
    ]
    if not loads:
        return [_missing("the load of other processes is unknown")]
    mean = sum(value * seconds for value, seconds in loads) / sum(seconds for _, seconds in loads)
    if mean <= max(BUSY_CORE_PERCENT, BUSY_HOST_PERCENT * cores):
        return []
    text = f"other processes used {mean / 100:.2f} of the host's {cores} cores on average"
    return [Caveat(kind="busy_host", text=text, value=mean / 100)]


def _missing(text: str) -> Caveat:
    return Caveat(kind="telemetry_missing", text=text)


def _masks(span: Sequence[WeightedRow], gpu: int) -> list[int]:
    return [*map(int, _column_values(span, gpu_column(gpu, telemetry_csv.THROTTLE_REASONS)))]


def _column_values(span: Iterable[WeightedRow], column: str) -> list[float]:
    values = (weighted.row.get(column) for weighted in span)
    return [value for value in values if value is not None]


def _gpus(rows: Sequence[TelemetryRow]) -> list[int]:
    names = rows[0] if rows else {}
    return sorted({int(match[1]) for name in names if (match := _GPU_COLUMN.match(name))})


def _time(row: TelemetryRow) -> float:
    at_s = row[telemetry_csv.MONOTONIC]
    assert at_s is not None
    return at_s


def gpu_energy_joules(
    rows: Sequence[TelemetryRow], gpu: int, start_s: float, end_s: float
) -> float | None:
    """Return the energy of one GPU: of its energy counter, or else the integral of its power."""
    counter = column_points(rows, gpu_column(gpu, telemetry_csv.ENERGY))
    if all(later >= earlier for (_, earlier), (_, later) in pairwise(counter)):
        energy = energy_from_counter(counter, start_s, end_s)
        if energy is not None:
            return energy
    power = column_points(rows, gpu_column(gpu, telemetry_csv.POWER))
    return energy_from_power(power, start_s, end_s)


def column_points(rows: Sequence[TelemetryRow], column: str) -> list[TimedValue]:
    """Return the values of a column over time, without empty cells."""
    return [(_time(row), value) for row in rows if (value := row.get(column)) is not None]


def energy_from_counter(
    counter: Sequence[TimedValue], start_s: float, end_s: float
) -> float | None:
    """Return the increase of a cumulative counter over the span, interpolated at both ends."""
    if (covered := _covered(counter, start_s, end_s)) is None:
        return None
    first_s, last_s = covered
    increase = interpolate(counter, last_s) - interpolate(counter, first_s)
    return increase * (end_s - start_s) / (last_s - first_s)


def energy_from_power(power: Sequence[TimedValue], start_s: float, end_s: float) -> float | None:
    """Integrate power in watts by the trapezoidal rule, interpolated at both ends."""
    if (covered := _covered(power, start_s, end_s)) is None:
        return None
    first_s, last_s = covered
    inside = [point for point in power if first_s < point[0] < last_s]
    ends = [(at_s, interpolate(power, at_s)) for at_s in (first_s, last_s)]
    points = [ends[0], *inside, ends[1]]
    area = sum((t2 - t1) * (p1 + p2) / 2 for (t1, p1), (t2, p2) in pairwise(points))
    return area * (end_s - start_s) / (last_s - first_s)


def interpolate(points: Sequence[TimedValue], at_s: float) -> float:
    """Interpolate linearly; ``at_s`` must lie between the first and the last point."""
    for (t1, v1), (t2, v2) in pairwise(points):
        if t1 <= at_s <= t2:
            return v1 + (v2 - v1) * (at_s - t1) / (t2 - t1) if t2 > t1 else v2
    raise ValueError(f"{at_s} s is outside of {points[0][0]} to {points[-1][0]} s")


def _covered(
    points: Sequence[TimedValue], start_s: float, end_s: float
) -> tuple[float, float] | None:
    if len(points) < 2:
        return None
    first_s, last_s = max(start_s, points[0][0]), min(end_s, points[-1][0])
    enough = last_s > first_s and last_s - first_s >= MIN_COVERAGE * (end_s - start_s)
    return (first_s, last_s) if enough else None


def with_clocks(
    csv: Path, ranks: Sequence[RankSamples], devices: Sequence[int]
) -> tuple[RankSamples, ...]:
    """Return the ranks with the clock of the rank's GPU in every window.

    Rank k has GPU ``devices[k]``. A clock is an instantaneous value: only rows that were taken
    within a window count.
    """
    rows = read_rows(csv)
    return tuple(
        dataclasses.replace(
            rank,
            windows=tuple(_with_clock(w, devices[rank.rank], rows) for w in rank.windows),
        )
        for rank in ranks
    )


def _with_clock(window: Window, gpu: int, rows: Sequence[TelemetryRow]) -> Window:
    first = bisect_left(rows, window.start_s, key=_time)
    last = bisect_right(rows, window.start_s + window.seconds, key=_time)
    clock = gpu_column(gpu, telemetry_csv.SM_CLOCK)
    clocks = [(mhz, row) for row in rows[first:last] if (mhz := row.get(clock)) is not None]
    if not clocks:
        return window
    reasons = gpu_column(gpu, telemetry_csv.THROTTLE_REASONS)
    masks = [int(row.get(reasons) or 0) for _, row in clocks]
    frequent = (
        text
        for bit, text in CLOCK_LIMITS.items()
        if 2 * sum(bool(mask & bit) for mask in masks) >= len(masks)
    )
    return dataclasses.replace(
        window,
        clock_mhz=median([mhz for mhz, _ in clocks]),
        throttle_reason="; ".join(frequent),
    )
