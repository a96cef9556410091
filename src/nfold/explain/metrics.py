"""Compute the metrics of a measurement that trials are compared by. Pure functions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from nfold.analysis.step_time import (
    global_batch,
    step_time,
    typical_step_ms,
    whole_batch_step_ms,
    window_step_times,
)
from nfold.core.measurement import EpochGap, Measurement, RankSamples, Window
from nfold.core.plan import Plan
from nfold.core.stats import mad_deviation, median

STEP_CHUNKS = 10
MIN_CLOCK_SAMPLES = 2  # per device; a single sample may be of any moment
EXPLAINED_FRACTION = 0.5  # of a slowdown, by which a slow clock is its reason

WindowSteps = tuple[Window, tuple[float, ...]]  # a window and the milliseconds of its steps

# Milliseconds per step by name:
#
# step       all ranks together
# rank K     rank K by itself, if ranks do not synchronize
# slowest    what a step would take if such ranks did synchronize
# gap        time between epochs
# first      of gap, the wait for the first batch of an epoch
# periodic   periodic work; "period" is its period in steps
# host_gap   the usual host gap, on the rank where it is least
# ahead      by which the host is ahead of its devices when a window ends, on the rank with the least
# loading    in which the loader workers, in parallel, make the batches of a step
# waiting    of loading, in which they wait and do not compute
Metrics = dict[str, float]
# These may be 0 or negative: they have no logarithm.
ADDITIVE_METRICS = ("gap", "first", "periodic", "period", "host_gap", "ahead", "loading", "waiting")


def compute_metrics(measurement: Measurement, *, ranks_synchronize: bool) -> Metrics:
    """Return all metrics of a measurement; empty if nothing was timed."""
    return {
        **step_metrics(measurement, ranks_synchronize=ranks_synchronize),
        **additive_metrics(measurement),
    }


def step_metrics(measurement: Measurement, *, ranks_synchronize: bool) -> Metrics:
    """Return the positive metrics of steps."""
    ranks = ranks_with_windows(measurement)
    if not ranks:
        return {}
    if ranks_synchronize:
        step_ms = step_time(measurement)
        return {} if step_ms is None else {"step": step_ms}
    batch = global_batch(measurement, ranks) / len(ranks)
    own = {
        f"rank {rank.rank}": typical_step_ms(
            whole_batch_step_ms([[window] for window in rank.windows], batch)
        )
        for rank in ranks
    }
    mean = fmean(own.values())
    return {"step": mean, "slowest": mean * _slowest_rank_ratio(ranks), **own}


def additive_metrics(measurement: Measurement) -> Metrics:
    """Return the metrics that may be 0 or negative."""
    ranks = ranks_with_windows(measurement)
    if not ranks:
        return {}
    found, boundaries = _loading_metrics(measurement, ranks), _epoch_boundaries(measurement)
    if boundaries:
        found["first"] = median([1e3 * one.waited_s / one.steps for one in boundaries])
    drains = [
        [w.queue_drain_s for w in rank.windows if w.queue_drain_s is not None] for rank in ranks
    ]
    if all(drains):
        found["ahead"] = 1e3 * min(map(median, drains))
    gaps = [1e3 * one.seconds / one.steps for one in boundaries]
    gaps = gaps if measurement.plan.epochs is None else _epoch_gaps(measurement)
    return {**found, "gap": median(gaps)} if gaps else found


def relative_standard_error(measurement: Measurement) -> float:
    """Return the relative standard error of the median over the windows of a measurement.

    It is computed from their median absolute deviation, because a single slow window must not
    dominate it (F. R. Hampel, The Influence Curve, JASA 69, 1974).
    """
    times = [ms for ms, _ in window_step_times(measurement)]
    if len(times) < 2:
        return 0.0
    return float(1.25 * mad_deviation(times) / median(times) / len(times) ** 0.5)


def contended_core_fraction(measurement: Measurement) -> float:
    """Return the fraction of the host's cores that other processes took from the run."""
    plan, cores = measurement.plan, measurement.machine.cores
    each = (plan.cores_per_device or 1) if plan.device == "cpu" else 1 + (plan.workers or 0)
    others = sum(one.value or 0.0 for one in measurement.warnings if one.kind == "busy_host")
    return min(others, max(0.0, others + each * (plan.devices or 1) - cores)) / cores


def ranks_with_windows(measurement: Measurement) -> list[RankSamples]:
    """Return the ranks with windows; empty if the run failed."""
    return [r for r in measurement.ranks if r.windows] if measurement.status == "ok" else []


def _slowest_rank_ratio(ranks: Sequence[RankSamples]) -> float:
    # The mean over steps of the slowest rank, over that of the mean rank. The median over chunks
    # of steps limits the weight of a disturbance to that of a window. If batches are replayed, a
    # chunk has each of them once.
    steps = list(zip(*(rank.step_ms for rank in ranks), strict=False))
    replayed = len({index for window in ranks[0].windows for index in window.batch_indices})
    size = replayed or max(1, -(-len(steps) // STEP_CHUNKS))
    last = len(steps) // size * size if replayed else len(steps)
    chunks = [steps[k : k + size] for k in range(0, last or len(steps), size)]
    return median([sum(map(max, chunk)) / sum(map(fmean, chunk)) for chunk in chunks])


def _loading_metrics(measurement: Measurement, ranks: Sequence[RankSamples]) -> Metrics:
    found = []
    for rank in ranks:
        fetches = [window.fetches for window in rank.windows if window.fetches is not None]
        batches = sum(one.batches for one in fetches)
        if batches:
            seconds = (sum(one.seconds for one in fetches), sum(one.waited_s for one in fetches))
            found.append([loading_ms_per_step(measurement.plan, batches, s) for s in seconds])
    return dict(zip(("loading", "waiting"), max(found), strict=True)) if found else {}


def loading_ms_per_step(plan: Plan, batches: int, seconds: float) -> float:
    """Return the milliseconds per step that loader workers need in parallel.

    ``seconds`` is the sum over workers of the time for ``batches``.
    """
    return 1e3 * seconds * plan.accumulate / max(1, plan.workers or 0) / batches


def _epoch_boundaries(measurement: Measurement) -> list[EpochGap]:
    """Return the gap before every timed epoch, of the rank where it is shortest.

    That rank waits for the others within a step, if it waits. With short epochs the step does not
    count, so that the longest gap is returned.
    """
    variant = measurement.variant
    pick = max if variant is not None and variant.batches_per_epoch is not None else min
    windows = zip(*(rank.windows for rank in measurement.ranks), strict=False)
    boundaries = ([window.epoch_gap for window in same] for same in windows)
    return [
        pick((gap for gap in gaps if gap is not None), key=lambda gap: gap.seconds / gap.steps)
        for gaps in boundaries
        if None not in gaps
    ]


def _epoch_gaps(measurement: Measurement) -> list[float]:
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
            inside_s = sum(window.seconds for window in inside)
            found.append(1e3 * (epoch.seconds - inside_s) / steps)
        first += steps
    return found


def equalize_epoch_gaps(measurement: Measurement) -> Measurement:
    """Move the wait for a late rank from the first step of an epoch to the epoch gap.

    Ranks that begin an epoch early wait in its first step for a rank that is still in the gap. The
    gap is then as long for all ranks, and the step no longer than others.
    """
    ranks, variant = measurement.ranks, measurement.variant
    synchronize = len(ranks) > 1 and (variant is None or variant.ranks_synchronize)
    if not synchronize or measurement.status != "ok" or not all(rank.step_ms for rank in ranks):
        return measurement
    usual = [median(rank.step_ms) for rank in ranks]
    timed = [list(rank.windows_with_step_times()) for rank in ranks]
    moved = [_equalized_windows(windows, usual) for windows in zip(*timed, strict=False)]
    equalized = []
    for k, rank in enumerate(ranks):
        own = [*(windows[k] for windows in moved), *timed[k][len(moved) :]]
        step_ms = tuple(ms for _, each in own for ms in each)
        windows = tuple(window for window, _ in own)
        equalized.append(dataclasses.replace(rank, windows=windows, step_ms=step_ms))
    return dataclasses.replace(measurement, ranks=tuple(equalized))


def _equalized_windows(
    windows: Sequence[WindowSteps], usual: Sequence[float]
) -> Sequence[WindowSteps]:
    gaps = [window.epoch_gap for window, _ in windows if window.epoch_gap is not None]
    same = len({window.first_step for window, _ in windows}) == 1
    if not same or len(gaps) < len(windows) or not all(step_ms for _, step_ms in windows):
        return windows
    last_s = max(gap.seconds for gap in gaps)
    ready_s = max(gap.seconds - gap.waited_s for gap in gaps)
    pairs = zip(windows, usual, strict=True)
    return [_equalized_window(one, usual_ms, last_s, ready_s) for one, usual_ms in pairs]


def _equalized_window(
    one: WindowSteps, usual_ms: float, last_s: float, ready_s: float
) -> WindowSteps:
    # Without waiting for first batches, all ranks would start when the last is ready for its own
    # (after ready_s). A longer gap is a wait for batches, of this rank or another.
    window, (first_ms, *other_ms) = one
    assert window.epoch_gap is not None
    own_s = window.epoch_gap.seconds
    late_s = min(last_s - own_s, max(0.0, first_ms - usual_ms) / 1e3)
    waited_s = max(0.0, own_s + late_s - ready_s)
    gap = dataclasses.replace(window.epoch_gap, seconds=own_s + late_s, waited_s=waited_s)
    moved = dataclasses.replace(window, seconds=window.seconds - late_s, epoch_gap=gap)
    return moved, (first_ms - 1e3 * late_s, *other_ms)


@dataclass(frozen=True)
class GpuClockRate:
    """The clock of a GPU's multiprocessors in MHz, and why it is reduced, if the driver reports it."""

    mhz: float
    throttle_reason: str = ""


def gpu_clock_rates(measurements: Iterable[Measurement], devices: int) -> tuple[GpuClockRate, ...]:
    """Return the typical clock of every device while no rank waits for another.

    A device that waits computes less, needs less power and runs at a higher clock: only ranks
    without communication are comparable. Empty if a device has fewer than ``MIN_CLOCK_SAMPLES``.
    """
    samples: dict[int, list[GpuClockRate]] = {}
    for one in measurements:
        variant = one.variant
        if variant is None or variant.ranks_synchronize or len(one.ranks) != devices:
            continue
        for rank in one.ranks:
            samples.setdefault(variant.device_of(rank.rank, rank.rank), []).extend(
                GpuClockRate(w.clock_mhz, w.throttle_reason) for w in rank.windows if w.clock_mhz
            )
    every = [samples.get(device, []) for device in range(devices)]
    if devices < 2 or any(len(rates) < MIN_CLOCK_SAMPLES for rates in every):
        return ()
    return tuple(
        GpuClockRate(
            median([rate.mhz for rate in rates]),
            Counter(rate.throttle_reason for rate in rates).most_common(1)[0][0],
        )
        for rates in every
    )


def slow_clock_advice(rates: Sequence[GpuClockRate], device: int, slowdown: float) -> str | None:
    """Return the advice for a device that is ``slowdown`` times as slow as the others.

    None if its clock does not explain that.
    """
    if device >= len(rates):
        return None
    own, others = rates[device], median([r.mhz for at, r in enumerate(rates) if at != device])
    if others / own.mhz - 1 < EXPLAINED_FRACTION * (slowdown - 1):
        return None
    reason = f" ({own.throttle_reason})" if own.throttle_reason else ""
    return (
        f"its clock is {own.mhz:,.0f} MHz{reason}, that of the others {others:,.0f} MHz: check its "
        "cooling and its power limit, or exclude it"
    )
