"""Energy of one GPU over a span, from its counter or from its power. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from nfold.telemetry import columns
from nfold.telemetry.read import TelemetryRow

TimedValue = tuple[float, float]
"""Seconds on the monotonic clock, and a value then."""

MIN_COVERAGE = 0.5
"""Points that cover less of the span than this half say too little about it."""


def gpu_energy_joules(
    found: Sequence[TelemetryRow], gpu: int, start_s: float, end_s: float
) -> float | None:
    """Energy of one GPU in the span; None where it says neither energy nor power there."""
    counter = column_points(found, columns.gpu_column(gpu, columns.ENERGY))
    if all(later >= earlier for (_, earlier), (_, later) in pairwise(counter)):
        energy = energy_from_counter(counter, start_s, end_s)
        if energy is not None:
            return energy
    return energy_from_power(
        column_points(found, columns.gpu_column(gpu, columns.POWER)), start_s, end_s
    )


def column_points(found: Sequence[TelemetryRow], column: str) -> list[TimedValue]:
    """The values of a column where it has one, over time."""
    pairs = [(row.get(columns.MONOTONIC), row.get(column)) for row in found]
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
