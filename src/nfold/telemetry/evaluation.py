"""What telemetry says about a measurement: its energy, and the doubts it casts on the numbers.

Everything here is over the rows of one telemetry.csv and a span [start_s, end_s] of the host's
monotonic clock. A row speaks for the time since the row before it.
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
from nfold.telemetry.telemetry_csv import TelemetryRow, read_rows, read_rows_and_damage

THROTTLE_BITS = {
    0x08: "hardware slowdown",
    0x20: "thermal, by the driver",
    0x40: "thermal, by the hardware",
    0x80: "power brake",
}
"""Bits of nvml.h's ``nvmlClocksEventReasons`` that mean the card was held back by a fault."""
POWER_CAP_BIT = 0x04
"""The bit of a card that has reached its power limit: ordinary under full load."""

BUSY_CORE_PERCENT = 20.0
BUSY_HOST_PERCENT = 2.0
"""Other load is a doubt above 20 % of one core and above 2 % of all cores.

An idle machine's own services stay below both; one foreign process that computes takes 40 to
100 % of a core even from two busy ones.
"""
MAX_MISSING_ROWS = 3.0
"""Rows that end this many intervals before the span does were cut short."""

ESSENTIAL_COLUMNS = (
    telemetry_csv.UTILISATION,
    telemetry_csv.MEMORY_USED,
    telemetry_csv.POWER,
    telemetry_csv.SM_CLOCK,
    telemetry_csv.THROTTLE_REASONS,
)
"""What every data-centre card says; without it a throttled or idle card goes unseen."""

_GPU_COLUMN = re.compile(r"gpu(\d+)_")


@dataclass(frozen=True)
class WeightedRow:
    """A row and how many seconds of the span it speaks for."""

    row: TelemetryRow
    seconds: float


def energy_joules(csv: Path, start_s: float, end_s: float) -> float | None:
    """Energy of all watched GPUs over the span; None where no device says.

    The card's energy counter where it has one, else its power over time; a card that says
    neither is left out, and ``doubts`` names it.
    """
    found = read_rows(csv)
    said = [gpu_energy_joules(found, gpu, start_s, end_s) for gpu in _gpus(found)]
    known = [energy for energy in said if energy is not None]
    return sum(known) if known else None


def telemetry_caveats(
    csv: Path, start_s: float, end_s: float, *, cores: int | None = None
) -> list[Caveat]:
    """Every doubt of kind ``telemetry_missing``, ``throttled``, ``power_capped``,
    ``busy_device`` or ``busy_host`` that the rows of the span raise.

    ``cores`` is the number of cores of the host, this one's where it is None.
    """
    found, damaged = read_rows_and_damage(csv)
    spells = weighted_rows(found, start_s, end_s)
    missing = check_missing_rows(found, spells, end_s)
    if damaged:
        text = f"{damaged} damaged rows of {csv.name} were skipped: load and energy are less exact"
        missing.append(_missing_telemetry(text))
    if not spells:
        return missing
    gpus = _gpus(found)
    per_gpu = [doubt for gpu in gpus for doubt in _about_gpu(spells, gpu)]
    return [*missing, *per_gpu, *check_busy_host(spells, cores or os.cpu_count() or 1)]


def weighted_rows(found: Sequence[TelemetryRow], start_s: float, end_s: float) -> list[WeightedRow]:
    """The rows that speak for a part of the span."""
    times = [_time(row) for row in found]
    overlaps = [min(t, end_s) - max(before, start_s) for before, t in pairwise(times)]
    spoken = zip(found[1:], overlaps, strict=True)
    return [WeightedRow(row, overlap) for row, overlap in spoken if overlap > 0]


def check_missing_rows(
    rows: Sequence[TelemetryRow], spells: Sequence[WeightedRow], end_s: float
) -> list[Caveat]:
    """The sampler wrote nothing about the span, or ended before it."""
    if not spells:
        return [
            _missing_telemetry(
                "no telemetry of the timed part: load, energy and throttling are unknown"
            )
        ]
    times = sorted(_time(row) for row in rows)
    interval_s = (times[-1] - times[0]) / (len(times) - 1)
    early_s = end_s - times[-1]
    if early_s <= MAX_MISSING_ROWS * interval_s:
        return []
    return [_missing_telemetry(f"telemetry ended {early_s:.0f} s before the timed part did")]


def _about_gpu(spells: Sequence[WeightedRow], gpu: int) -> list[Caveat]:
    return [
        *check_silent_gpu(spells, gpu),
        *check_throttling(spells, gpu),
        *check_power_cap(spells, gpu),
        *check_busy_gpu(spells, gpu),
    ]


def check_silent_gpu(spells: Sequence[WeightedRow], gpu: int) -> list[Caveat]:
    """A GPU that said nothing, stopped answering, or never says something essential."""
    names = [telemetry_csv.gpu_column(gpu, what) for what in ESSENTIAL_COLUMNS]
    silent = [spell for spell in spells if all(spell.row.get(name) is None for name in names)]
    if len(silent) == len(spells):
        return [
            _missing_telemetry(
                f"GPU {gpu} said nothing: its load, energy and throttling are unknown"
            )
        ]
    if silent:
        return [
            _missing_telemetry(f"GPU {gpu} did not answer in {len(silent)} of {len(spells)} rows")
        ]
    never = [name for name in names if all(spell.row.get(name) is None for spell in spells)]
    return [_missing_telemetry(f"the device does not say {', '.join(never)}")] if never else []


def check_throttling(spells: Sequence[WeightedRow], gpu: int) -> list[Caveat]:
    """A GPU that was slowed down by heat, a power brake or its hardware."""
    masks = _masks(spells, gpu)
    reasons = [text for bit, text in THROTTLE_BITS.items() if any(mask & bit for mask in masks)]
    if not reasons:
        return []
    rows_hit = sum(any(mask & bit for bit in THROTTLE_BITS) for mask in masks)
    text = f"GPU {gpu} was throttled in {rows_hit} of {len(spells)} rows ({'; '.join(reasons)})"
    return [Caveat(kind="throttled", text=text)]


def check_power_cap(spells: Sequence[WeightedRow], gpu: int) -> list[Caveat]:
    """A GPU that ran at its power limit: its clock, and so its speed, depends on it."""
    rows_hit = sum(bool(mask & POWER_CAP_BIT) for mask in _masks(spells, gpu))
    if not rows_hit:
        return []
    text = f"GPU {gpu} ran at its power limit in {rows_hit} of {len(spells)} rows"
    return [Caveat(kind="power_capped", text=text)]


def check_busy_gpu(spells: Sequence[WeightedRow], gpu: int) -> list[Caveat]:
    """Another process computed on the GPU, or held memory there."""
    counts = _column_values(spells, telemetry_csv.gpu_column(gpu, telemetry_csv.OTHER_PROCESSES))
    busy = [count for count in counts if count > 0]
    if not busy:
        return []
    who = "another process was" if max(busy) == 1 else f"{max(busy):.0f} other processes were"
    text = f"{who} on GPU {gpu} in {len(busy)} of {len(spells)} rows"
    return [Caveat(kind="busy_device", text=text)]


def check_busy_host(spells: Sequence[WeightedRow], cores: int) -> list[Caveat]:
    """Other processes used the host's cores in the span."""
    said = [
        (value, spell.seconds)
        for spell in spells
        if (value := spell.row.get(telemetry_csv.HOST_OTHER_LOAD)) is not None
    ]
    if not said:
        return [_missing_telemetry("the load of other processes is unknown")]
    mean = sum(value * seconds for value, seconds in said) / sum(seconds for _, seconds in said)
    if mean <= max(BUSY_CORE_PERCENT, BUSY_HOST_PERCENT * cores):
        return []
    text = f"other processes used {mean / 100:.2f} of the host's {cores} cores on average"
    return [Caveat(kind="busy_host", text=text, value=mean / 100)]


def _missing_telemetry(text: str) -> Caveat:
    return Caveat(kind="telemetry_missing", text=text)


def _masks(spells: Sequence[WeightedRow], gpu: int) -> list[int]:
    return [
        int(mask)
        for mask in _column_values(
            spells, telemetry_csv.gpu_column(gpu, telemetry_csv.THROTTLE_REASONS)
        )
    ]


def _column_values(spells: Iterable[WeightedRow], column: str) -> list[float]:
    values = (spell.row.get(column) for spell in spells)
    return [value for value in values if value is not None]


def _gpus(found: Sequence[TelemetryRow]) -> list[int]:
    names = found[0] if found else {}
    return sorted({int(match[1]) for name in names if (match := _GPU_COLUMN.match(name))})


def _time(row: TelemetryRow) -> float:
    at_s = row[telemetry_csv.MONOTONIC]
    assert at_s is not None
    return at_s


TimedValue = tuple[float, float]
"""Seconds on the monotonic clock, and a value then."""

MIN_COVERAGE = 0.5
"""Points that cover less of the span than this half say too little about it."""


def gpu_energy_joules(
    found: Sequence[TelemetryRow], gpu: int, start_s: float, end_s: float
) -> float | None:
    """Energy of one GPU in the span; None where it says neither energy nor power there."""
    counter = column_points(found, telemetry_csv.gpu_column(gpu, telemetry_csv.ENERGY))
    if all(later >= earlier for (_, earlier), (_, later) in pairwise(counter)):
        energy = energy_from_counter(counter, start_s, end_s)
        if energy is not None:
            return energy
    return energy_from_power(
        column_points(found, telemetry_csv.gpu_column(gpu, telemetry_csv.POWER)), start_s, end_s
    )


def column_points(found: Sequence[TelemetryRow], column: str) -> list[TimedValue]:
    """The values of a column where it has one, over time."""
    pairs = [(row.get(telemetry_csv.MONOTONIC), row.get(column)) for row in found]
    return [(at_s, value) for at_s, value in pairs if at_s is not None and value is not None]


def energy_from_counter(
    counter: Sequence[TimedValue], start_s: float, end_s: float
) -> float | None:
    """The growth of a cumulative counter over the span, interpolated at both ends."""
    covered = _covered(counter, start_s, end_s)
    if covered is None:
        return None
    first_s, last_s = covered
    grown = interpolate(counter, last_s) - interpolate(counter, first_s)
    return grown * (end_s - start_s) / (last_s - first_s)


def energy_from_power(power: Sequence[TimedValue], start_s: float, end_s: float) -> float | None:
    """Power in watts over time, by the trapezoidal rule, interpolated at both ends."""
    covered = _covered(power, start_s, end_s)
    if covered is None:
        return None
    first_s, last_s = covered
    inside = [point for point in power if first_s < point[0] < last_s]
    ends = [(at_s, interpolate(power, at_s)) for at_s in (first_s, last_s)]
    line = [ends[0], *inside, ends[1]]
    area = sum((t2 - t1) * (p1 + p2) / 2 for (t1, p1), (t2, p2) in pairwise(line))
    return area * (end_s - start_s) / (last_s - first_s)


def interpolate(line: Sequence[TimedValue], at_s: float) -> float:
    """Linear interpolation; ``at_s`` is between the first and the last point."""
    for (t1, v1), (t2, v2) in pairwise(line):
        if t1 <= at_s <= t2:
            return v1 + (v2 - v1) * (at_s - t1) / (t2 - t1) if t2 > t1 else v2
    raise ValueError(f"{at_s} s is outside of {line[0][0]} to {line[-1][0]} s")


def _covered(
    line: Sequence[TimedValue], start_s: float, end_s: float
) -> tuple[float, float] | None:
    """The part of the span between the first and the last point, where that is most of it.

    The rest is taken to be like it.
    """
    if len(line) < 2:
        return None
    first_s, last_s = max(start_s, line[0][0]), min(end_s, line[-1][0])
    enough = last_s > first_s and last_s - first_s >= MIN_COVERAGE * (end_s - start_s)
    return (first_s, last_s) if enough else None


CLOCK_LIMITS = {POWER_CAP_BIT: "at its power limit", **THROTTLE_BITS}


def with_clocks(
    csv: Path, ranks: Sequence[RankSamples], devices: Sequence[int]
) -> tuple[RankSamples, ...]:
    """The ranks, every window with the clock of its GPU by the rows that were taken in it.

    Rank k has GPU ``devices[k]``. A clock is read at one moment: a row speaks
    for that, not for the time since the row before.
    """
    found = read_rows(csv)
    times = [row[telemetry_csv.MONOTONIC] or 0.0 for row in found]
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
        telemetry_csv.gpu_column(gpu, name)
        for name in (telemetry_csv.SM_CLOCK, telemetry_csv.THROTTLE_REASONS)
    )
    said = [(mhz, int(row.get(why) or 0)) for row in own if (mhz := row.get(clock)) is not None]
    if not said:
        return window
    masks = [mask for _, mask in said]
    return dataclasses.replace(
        window, clock_mhz=median([mhz for mhz, _ in said]), throttle_reason=_clock_limit(masks)
    )


def _clock_limit(masks: Sequence[int]) -> str:
    often = (
        text
        for bit, text in CLOCK_LIMITS.items()
        if 2 * sum(bool(m & bit) for m in masks) >= len(masks)
    )
    return "; ".join(often)
