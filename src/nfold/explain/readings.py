"""From one measurement to the few numbers that the ladder compares. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from nfold.measurement import Measurement, RankSamples
from nfold.stats import median

CHUNKS = 10
Readings = dict[str, float]
"""``step``: ms of a step of all ranks; ``rank K``: of rank K by itself, where ranks do not wait;
``slowest``: what a step would take if they did; ``gap``: ms a step between epochs."""


def readings(measurement: Measurement, *, coupled: bool) -> Readings:
    """The numbers of one measurement; empty where nothing was timed."""
    ranks = [rank for rank in measurement.ranks if rank.windows]
    if not ranks or measurement.status != "ok":
        return {}
    own = {f"rank {rank.rank}": median(_window_ms(rank)) for rank in ranks}
    found: Readings = {"step": median([max(window) for window in _per_window(ranks)])}
    if not coupled:
        found = {"step": fmean(own.values()), "slowest": _slowest(ranks), **own}
    gaps = _gaps(measurement)
    return {**found, "gap": median(gaps)} if gaps else found


def scatter(measurement: Measurement) -> float:
    """The relative standard error of a median over this measurement's windows."""
    ranks = [rank for rank in measurement.ranks if rank.windows]
    times = [max(window) for window in _per_window(ranks)] if ranks else []
    if len(times) < 2:
        return 0.0
    return float(1.25 * stdev(times) / fmean(times) / len(times) ** 0.5)


def _window_ms(rank: RankSamples) -> list[float]:
    return [1e3 * window.seconds / window.steps for window in rank.windows]


def _per_window(ranks: Sequence[RankSamples]) -> list[tuple[float, ...]]:
    return list(zip(*map(_window_ms, ranks), strict=False))


def _slowest(ranks: Sequence[RankSamples]) -> float:
    """Of ranks that do not wait: the slowest of every step, as if they did.

    A median over chunks of steps, so that one disturbance counts no more than in a window.
    """
    slowest = [max(step) for step in zip(*(rank.step_ms for rank in ranks), strict=False)]
    size = max(1, -(-len(slowest) // CHUNKS))
    return median([fmean(slowest[k : k + size]) for k in range(0, len(slowest), size)])


def _gaps(measurement: Measurement) -> list[float]:
    """Of every epoch that was timed whole: ms a step that no window holds."""
    rank = measurement.ranks[0]
    batch = measurement.plan.batch or 1
    found, step, windows = [], rank.warmup_steps, list(rank.windows)
    first = 0
    for epoch in rank.epochs:
        steps = -(-epoch.samples // batch)
        inside = []
        while windows and step < first + steps:
            step += windows[0].steps
            inside.append(windows.pop(0))
        if sum(window.steps for window in inside) == steps:
            timed = sum(window.seconds for window in inside)
            found.append(1e3 * (epoch.seconds - timed) / steps)
        first += steps
    return found
