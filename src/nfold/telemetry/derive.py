"""What telemetry says about a measurement: its energy, and the doubts it casts on the numbers.

Everything here is over the rows of one telemetry.csv and a span [start_s, end_s] of the host's
monotonic clock. A row speaks for the time since the row before it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from nfold.measurement import Caveat
from nfold.telemetry import columns
from nfold.telemetry.energy import gpu_energy_joules
from nfold.telemetry.read import TelemetryRow, read_rows

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
    columns.UTILISATION,
    columns.MEMORY_USED,
    columns.POWER,
    columns.SM_CLOCK,
    columns.THROTTLE_REASONS,
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
    found = read_rows(csv)
    spells = weighted_rows(found, start_s, end_s)
    missing = check_missing_rows(found, spells, end_s)
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
    names = [columns.gpu_column(gpu, what) for what in ESSENTIAL_COLUMNS]
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
    counts = _column_values(spells, columns.gpu_column(gpu, columns.OTHER_PROCESSES))
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
        if (value := spell.row.get(columns.HOST_OTHER_LOAD)) is not None
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
        for mask in _column_values(spells, columns.gpu_column(gpu, columns.THROTTLE_REASONS))
    ]


def _column_values(spells: Iterable[WeightedRow], column: str) -> list[float]:
    values = (spell.row.get(column) for spell in spells)
    return [value for value in values if value is not None]


def _gpus(found: Sequence[TelemetryRow]) -> list[int]:
    names = found[0] if found else {}
    return sorted({int(match[1]) for name in names if (match := _GPU_COLUMN.match(name))})


def _time(row: TelemetryRow) -> float:
    at_s = row[columns.MONOTONIC]
    assert at_s is not None
    return at_s
