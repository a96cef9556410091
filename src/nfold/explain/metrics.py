"""From one measurement to the few numbers that the ladder compares. Pure functions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from nfold.core.measurement import EpochGap, Measurement, RankSamples, Window
from nfold.core.plan import Plan
from nfold.core.stats import mad_deviation, median, weighted_median

STEP_CHUNKS = 10
WHOLE_BATCH_FRACTION = 0.5
"""Of the largest batch."""
WeightedStepMs = tuple[float, int]
"""Milliseconds of a step, and of how many."""
Metrics = dict[str, float]
"""``step``: ms of a step of all ranks; ``rank K``: of rank K by itself, where ranks do not wait;
``slowest``: what a step would take if they did; ``gap``: ms a step between epochs; ``first``: those
of them spent waiting for an epoch's first batch; ``recurring``: ms a step of what comes after some
steps only, and ``every``, after how many; ``pause``: ms between two steps in which the host usually
does something else, on the rank where that is least; ``ahead``: ms by which the host is ahead of
its devices when a window ends, on the rank where that is least; ``loading``: ms in which the
loader's workers, side by side, make the batches of a step; ``waiting``: of these the ms in which
they wait and do not compute."""
ADDITIVE_METRICS = ("gap", "first", "recurring", "every", "pause", "ahead", "loading", "waiting")
"""Readings that may be 0 or less."""


def compute_metrics(measurement: Measurement, *, ranks_synchronize: bool) -> Metrics:
    """The numbers of one measurement; empty where nothing was timed."""
    return {
        **step_metrics(measurement, ranks_synchronize=ranks_synchronize),
        **additive_metrics(measurement),
    }


def step_metrics(measurement: Measurement, *, ranks_synchronize: bool) -> Metrics:
    """Those that are above 0, of steps.

    Steps are counted by their samples, as whole batches: the last batch of an epoch is smaller,
    and another part of an epoch's steps where a batch is.
    """
    ranks = ranks_with_windows(measurement)
    if not ranks:
        return {}
    batch = measurement.plan.batch or _script_batch(ranks)
    found: Metrics = {"step": _typical_step_ms(_global_step_ms(ranks, batch))}
    if not ranks_synchronize:
        own = {
            f"rank {r.rank}": _typical_step_ms(_rank_step_ms(r, batch / len(ranks))) for r in ranks
        }
        mean = fmean(own.values())
        found = {"step": mean, "slowest": mean * _slowest_rank_ratio(ranks), **own}
    return found


def additive_metrics(measurement: Measurement) -> Metrics:
    """Those that may be 0 or less."""
    ranks = ranks_with_windows(measurement)
    if not ranks:
        return {}
    found, ends = _loading_metrics(measurement, ranks), _epoch_boundaries(measurement)
    if ends:
        found["first"] = median([1e3 * one.waited_s / one.steps for one in ends])
    each = [
        [w.queue_drain_s for w in rank.windows if w.queue_drain_s is not None] for rank in ranks
    ]
    if all(each):
        found["ahead"] = 1e3 * min(map(median, each))
    gaps = [1e3 * one.seconds / one.steps for one in ends]
    gaps = gaps if measurement.plan.epochs is None else _epoch_gaps(measurement)
    return {**found, "gap": median(gaps)} if gaps else found


def relative_standard_error(measurement: Measurement) -> float:
    """The relative standard error of a median over this measurement's windows.

    By their median absolute deviation: an epoch's smaller last batch, for which everything is
    recorded once more, moves neither (F. R. Hampel, The Influence Curve, JASA 69, 1974).
    """
    ranks = [rank for rank in measurement.ranks if rank.windows]
    times = [ms for ms, _ in _global_step_ms(ranks, 1)] if ranks else []
    if len(times) < 2:
        return 0.0
    return float(1.25 * mad_deviation(times) / median(times) / len(times) ** 0.5)


def contended_core_fraction(measurement: Measurement) -> float:
    """The part of the host's cores that other processes took from a run's own."""
    plan, cores = measurement.plan, measurement.machine.cores
    each = (plan.cores_per_device or 1) if plan.device == "cpu" else 1 + (plan.workers or 0)
    others = sum(one.value or 0.0 for one in measurement.warnings if one.kind == "busy_host")
    return min(others, max(0.0, others + each * (plan.devices or 1) - cores)) / cores


def ranks_with_windows(measurement: Measurement) -> list[RankSamples]:
    """The ranks with windows, of a run that ended well."""
    return [r for r in measurement.ranks if r.windows] if measurement.status == "ok" else []


def _script_batch(ranks: Sequence[RankSamples]) -> int:
    return max(1, sum(round(median([w.samples / w.steps for w in r.windows])) for r in ranks))


def _typical_step_ms(timed: Sequence[WeightedStepMs]) -> float:
    return weighted_median([ms for ms, _ in timed], [steps for _, steps in timed])


def _rank_step_ms(rank: RankSamples, share: float) -> list[WeightedStepMs]:
    return _whole_batch_ms([[window] for window in rank.windows], share)


def _global_step_ms(ranks: Sequence[RankSamples], batch: float) -> list[WeightedStepMs]:
    return _whole_batch_ms(list(zip(*(rank.windows for rank in ranks), strict=False)), batch)


def _whole_batch_ms(windows: Sequence[Sequence[Window]], batch: float) -> list[WeightedStepMs]:
    """Of windows of all ranks, those of whole batches, if there are any.

    What an epoch's last batch takes tells nothing of a whole one where it has a few samples.
    """
    counted = [(same, _samples(same)) for same in windows]
    least = WHOLE_BATCH_FRACTION * max(samples / same[0].steps for same, samples in counted)
    whole = [same for same, samples in counted if samples / same[0].steps >= least]
    return [
        (
            1e3 * max(window.seconds for window in same) * batch / max(1, _samples(same)),
            same[0].steps,
        )
        for same in _with_short_windows(whole)
    ]


def _with_short_windows(windows: Sequence[Sequence[Window]]) -> list[Sequence[Window]]:
    """With a shorter window that ends a pass, or a turn, as a part of the one before it.

    A loader has batches ready at the end of a pass, and at its beginning none: of 20 and 4 steps
    the 4 are no picture of a pass.
    """
    found: list[Sequence[Window]] = []
    longest = max(same[0].steps for same in windows)
    for same in windows:
        rest = same[0]
        last = found[-1][0] if found else rest
        follows = rest.epoch_gap is None and rest.first_step == last.first_step + last.steps
        if follows and rest.steps < longest:
            found[-1] = [_join_windows(*pair) for pair in zip(found[-1], same, strict=True)]
        else:
            found.append(same)
    return found


def _join_windows(one: Window, other: Window) -> Window:
    return dataclasses.replace(
        one,
        seconds=one.seconds + other.seconds,
        steps=one.steps + other.steps,
        samples=one.samples + other.samples,
    )


def _samples(same: Iterable[Window]) -> int:
    return sum(window.samples for window in same)


def _slowest_rank_ratio(ranks: Sequence[RankSamples]) -> float:
    """Of ranks that do not wait: the slowest of every step, over what a step takes them.

    A median over chunks of steps, so that one disturbance counts no more than in a window.
    """
    steps = list(zip(*(rank.step_ms for rank in ranks), strict=False))
    size = max(1, -(-len(steps) // STEP_CHUNKS))
    chunks = [steps[k : k + size] for k in range(0, len(steps), size)]
    return median([sum(map(max, chunk)) / sum(map(fmean, chunk)) for chunk in chunks])


def _loading_metrics(measurement: Measurement, ranks: Sequence[RankSamples]) -> Metrics:
    plan = measurement.plan
    found = [
        (loading_ms_per_step(plan, batches, seconds), loading_ms_per_step(plan, batches, waited))
        for batches, seconds, waited in map(_fetch_totals, ranks)
        if batches
    ]
    if not found:
        return {}
    loading, waiting = max(found)
    return {"loading": loading, "waiting": waiting}


def loading_ms_per_step(plan: Plan, batches: int, seconds: float) -> float:
    """Of a step, where its loader's workers were so many seconds, added up, about some batches."""
    return 1e3 * seconds * plan.accumulate / max(1, plan.workers or 0) / batches


def _fetch_totals(rank: RankSamples) -> tuple[int, float, float]:
    each = [window.fetches for window in rank.windows if window.fetches is not None]
    batches = sum(one.batches for one in each)
    return batches, sum(one.seconds for one in each), sum(one.waited_s for one in each)


def _epoch_boundaries(measurement: Measurement) -> list[EpochGap]:
    """Of every pass over the data that was timed: what lies between it and the one before.

    The rank that waits least: it waits for the others in a step, if it does. Where passes are cut
    short for nothing else, the one that waits longest: no step is asked for.
    """
    cut_short = (
        measurement.variant is not None and measurement.variant.batches_per_epoch is not None
    )
    pick = max if cut_short else min
    windows = zip(*(rank.windows for rank in measurement.ranks), strict=False)
    passes = ([window.epoch_gap for window in same] for same in windows)
    return [
        pick((one for one in each if one is not None), key=lambda one: one.seconds / one.steps)
        for each in passes
        if None not in each
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


# Where passes over the data end: ranks that have begun the next one wait for one that has not.
#
# They do so in a step. It is no longer than others for that: what lies between two passes is as long
# for all. Pure functions.

WindowSteps = tuple[Window, tuple[float, ...]]
"""A window with the milliseconds of its steps."""


def equalize_epoch_gaps(measurement: Measurement) -> Measurement:
    """What ranks wait in the first step of a pass for another that is still between the two lies
    between them, in no step; of ranks that wait for each other.
    """
    ranks, left_out = measurement.ranks, measurement.variant
    wait = len(ranks) > 1 and (left_out is None or left_out.ranks_synchronize)
    if not wait or measurement.status != "ok" or not all(rank.step_ms for rank in ranks):
        return measurement
    usual = [median(rank.step_ms) for rank in ranks]
    timed = [list(rank.windows_with_step_times()) for rank in ranks]
    moved = [_equalized_windows(windows, usual) for windows in zip(*timed, strict=False)]
    made = [
        _with_windows(rank, [*(windows[k] for windows in moved), *timed[k][len(moved) :]])
        for k, rank in enumerate(ranks)
    ]
    return dataclasses.replace(measurement, ranks=tuple(made))


def _equalized_windows(
    windows: Sequence[WindowSteps], usual: Sequence[float]
) -> Sequence[WindowSteps]:
    pauses = [window.epoch_gap for window, _ in windows if window.epoch_gap is not None]
    same = len({window.first_step for window, _ in windows}) == 1
    if not same or len(pauses) < len(windows) or not all(step_ms for _, step_ms in windows):
        return windows
    last_s = max(one.seconds for one in pauses)
    ready_s = max(one.seconds - one.waited_s for one in pauses)
    pairs = zip(windows, usual, strict=True)
    return [_equalized_window(one, usual_ms, last_s, ready_s) for one, usual_ms in pairs]


def _equalized_window(
    one: WindowSteps, usual_ms: float, last_s: float, ready_s: float
) -> WindowSteps:
    """Of one rank its first step without waiting for the last one, which began so late.

    Had nobody waited for a first batch, all would have begun when the last one was ready for it:
    what is longer than that is a wait for batches, its own or another rank's.
    """
    window, (first_ms, *rest) = one
    assert window.epoch_gap is not None
    own_s = window.epoch_gap.seconds
    late_s = min(last_s - own_s, max(0.0, first_ms - usual_ms) / 1e3)
    waited_s = max(0.0, own_s + late_s - ready_s)
    between = dataclasses.replace(window.epoch_gap, seconds=own_s + late_s, waited_s=waited_s)
    made = dataclasses.replace(window, seconds=window.seconds - late_s, epoch_gap=between)
    return made, (first_ms - 1e3 * late_s, *rest)


def _with_windows(rank: RankSamples, windows: Sequence[WindowSteps]) -> RankSamples:
    step_ms = tuple(ms for _, own in windows for ms in own)
    return dataclasses.replace(rank, windows=tuple(one for one, _ in windows), step_ms=step_ms)


MIN_SAMPLES = 2
"""Looks at every device: one may meet any moment."""
EXPLAINED_FRACTION = 0.5
"""Of the time by which a device is slow: a clock that explains less of it is not its reason."""


@dataclass(frozen=True)
class GpuClockRate:
    """Of a GPU's multiprocessors in MHz, and what held it back; nothing: no card said so."""

    mhz: float
    throttle_reason: str = ""


def gpu_clock_rates(measurements: Iterable[Measurement], devices: int) -> tuple[GpuClockRate, ...]:
    """Of every device while no rank waits for another; empty where some were not looked at.

    A device that waits computes less, needs less power, and so has a quicker clock: only ranks
    that exchange nothing are alike.
    """
    said: dict[int, list[GpuClockRate]] = {}
    for one in measurements:
        out = one.variant
        if out is None or out.ranks_synchronize or len(one.ranks) != devices:
            continue
        for rank in one.ranks:
            device = out.device_of(rank.rank, rank.rank)
            looks = (
                GpuClockRate(w.clock_mhz, w.throttle_reason) for w in rank.windows if w.clock_mhz
            )
            said.setdefault(device, []).extend(looks)
    each = [said.get(device, []) for device in range(devices)]
    if devices < 2 or any(len(looks) < MIN_SAMPLES for looks in each):
        return ()
    return tuple(_typical_clock_rate(looks) for looks in each)


def _typical_clock_rate(looks: Sequence[GpuClockRate]) -> GpuClockRate:
    held, _ = Counter(look.throttle_reason for look in looks).most_common(1)[0]
    return GpuClockRate(median([look.mhz for look in looks]), held)


def slow_clock_advice(rates: Sequence[GpuClockRate], device: int, slowdown: float) -> str | None:
    """What is told of a device whose steps are so many times as long as those of the others.

    None where its clock does not explain it.
    """
    if device >= len(rates):
        return None
    own, others = rates[device], median([c.mhz for at, c in enumerate(rates) if at != device])
    if others / own.mhz - 1 < EXPLAINED_FRACTION * (slowdown - 1):
        return None
    held = f", {own.throttle_reason}" if own.throttle_reason else ""
    clock = f"its clock is at {own.mhz:,.0f} MHz{held}, that of the others at {others:,.0f}"
    return f"{clock}: look at its cooling and its power limit, or leave it out"
