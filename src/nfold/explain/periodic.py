"""Find the periodic work of a script: what it does after some steps and not after all.

An evaluation, a checkpoint or a log makes the host gap before a step longer than usual (by the
median and the median absolute deviation: F. R. Hampel, The Influence Curve, JASA 69, 1974). The
gaps only show which steps are affected. How much longer these take is measured by the clock of
their devices, which may have had enough queued work meanwhile. Pure functions.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nfold.core.measurement import Measurement, RankSamples, Window
from nfold.core.stats import mad_deviation, median, midmean
from nfold.explain.design import Trial
from nfold.explain.metrics import Metrics

MIN_GAP_FRACTION = 0.1  # of a step: shorter gaps are not long, whatever the usual gap is
DEVIATIONS = 5.0  # by which a long gap exceeds the usual one
SIMILAR_RATIO = 2.0  # between neighbours: gaps that are further apart are of different kinds
MIN_COST_FRACTION = 0.005  # of a step: cheaper work is ignored
MIN_EVENTS = 2  # gaps of a kind; a single one may be anything
REGULAR_FRACTION = 0.75  # of the distances between gaps that are multiples of a period
OBSERVED_FRACTION = 0.5  # of the gaps that a period implies
UNCOUNTED_STEPS = 2  # backward passes before nfold observes the optimizer, which the script counted
AMBIGUOUS_PERIODS = {1, 2}  # of every second step it is unclear which of the two is usual

MsByStep = dict[int, float]  # milliseconds by step number


@dataclass(frozen=True)
class PeriodicEvent:
    """Similar host gaps: how much longer the next step is, and in which fraction of the steps."""

    cost_ms: float
    rate: float


@dataclass(frozen=True)
class PeriodicWork:
    """The periodic work of a process tree, observed for ``steps`` steps."""

    steps: int
    affected_steps: frozenset[int] = frozenset()
    events: tuple[PeriodicEvent, ...] = ()

    @property
    def ms_per_step(self) -> float:
        """The mean over all steps."""
        return sum(event.rate * event.cost_ms for event in self.events)

    @property
    def period(self) -> float | None:
        """Steps between two events of the kind that costs most."""
        most = max(self.events, key=lambda event: event.rate * event.cost_ms, default=None)
        return None if most is None else 1 / most.rate


def find_periodic_work(members: Mapping[Trial, Measurement]) -> dict[Trial, PeriodicWork]:
    """Return the periodic work of trials that shared a process tree, if host gaps were recorded.

    A trial over whole epochs measures the time outside its windows itself, and has no entry.
    """
    found: dict[tuple[tuple[float, ...], ...], dict[Trial, Measurement]] = {}
    for trial, one in members.items():
        gaps = tuple(rank.host_gaps_ms for rank in one.ranks)
        timed = one.status == "ok" and all(rank.step_ms for rank in one.ranks)
        if gaps and all(gaps) and timed and one.plan.epochs is None:
            found.setdefault(gaps, {})[trial] = one
    works = ((same, _periodic_work_of_processes([*same.values()])) for same in found.values())
    return {trial: work for same, work in works for trial in same}


def periodic_metrics(work: PeriodicWork | None, others: Iterable[PeriodicWork]) -> Metrics:
    """Return the metrics of a tree, if it ran long enough to show the events of ``others``."""
    rates = [event.rate for other in others for event in other.events]
    longest = 1 / min(rates) if rates else 0.0  # steps between two events of the rarest kind
    if work is None or (not work.events and work.steps < MIN_EVENTS * longest):
        return {}
    found = {"periodic": work.ms_per_step}
    if work.period is not None:
        found["period"] = work.period
    return found


def host_gap_metrics(measurement: Measurement, periodic: PeriodicWork | None) -> Metrics:
    """Return the usual host gap before the steps without periodic work, if gaps were recorded."""
    affected = periodic.affected_steps if periodic is not None else ()
    gaps = [
        [rank.host_gaps_ms[step] for step, _ in _numbered_step_ms(rank) if step not in affected]
        for rank in measurement.ranks
        if rank.host_gaps_ms
    ]
    known = measurement.ranks and len(gaps) == len(measurement.ranks) and all(gaps)
    return {"host_gap": min(map(midmean, gaps))} if known else {}


def without_affected_steps(measurement: Measurement, periodic: PeriodicWork | None) -> Measurement:
    """Remove the affected steps on all ranks; return all steps if no others are left."""
    if periodic is None or not periodic.affected_steps:
        return measurement
    ranks = tuple(_rank_without_steps(rank, periodic.affected_steps) for rank in measurement.ranks)
    left = all(rank.windows for rank in ranks)
    return dataclasses.replace(measurement, ranks=ranks) if left else measurement


def _periodic_work_of_processes(members: Sequence[Measurement]) -> PeriodicWork:
    """Find the periodic work of trials that ran in the same processes.

    Several ranks may be late for one event, or wait for the late rank: it counts once, as on the
    rank that is delayed most.
    """
    ranks = [list(same) for same in zip(*(one.ranks for one in members), strict=True)]
    last = min(len(same[0].host_gaps_ms) for same in ranks)
    step_ms = median([ms for same in ranks for one in same for ms in one.step_ms])
    steps = range(ranks[0][0].warmup_steps, last)
    gaps = [_long_gaps(same, steps) for same in ranks]
    excess = [_excess(same, own) for same, own in zip(ranks, gaps, strict=True)]
    # A rank that waits for another in its epoch gap is late in a step, the other is not.
    most = {step: max(one.get(step, 0.0) for one in excess) for step in excess[0]}
    found = [
        event
        for same, own, more in zip(ranks, gaps, excess, strict=True)
        for event in _events_of_rank(own, more, most, ObservedSteps(steps, same[0].epoch_starts))
    ]
    events: list[PeriodicEvent] = []
    taken: list[set[int]] = []
    for event, late in sorted(found, key=lambda one: -one[0].rate * one[0].cost_ms):
        known = any(2 * len(late & other) > len(late) for other in taken)
        if not known and event.rate * event.cost_ms > MIN_COST_FRACTION * step_ms:
            events.append(event)
            taken.append(late)
    return PeriodicWork(len(steps), frozenset().union(*taken), tuple(events))


def _events_of_rank(
    gaps: MsByStep, excess: MsByStep, most: MsByStep, observed: ObservedSteps
) -> Iterator[tuple[PeriodicEvent, set[int]]]:
    """Yield every kind of long gap of a rank, the longest first, and the steps after it.

    Work of every 10 steps also happens after every 50, within the work of every 50. Kinds are
    therefore counted together with the longer ones, whose rate is then subtracted. Gaps without a
    period may belong to the next kind: a gap lasts until the devices are done, and how far they
    are behind depends on the slot.
    """
    counted, skipped, rate_before = set[int](), set[int](), 0.0
    for similar in _similar_gaps(gaps):
        choices = (counted | similar, counted | similar | skipped)
        found = (find_period(sorted(steps), observed) for steps in choices)
        period = next(filter(None, found), None)
        together = counted if period is None else {*period.known}
        costs = [excess[step] for step in together - counted if step in excess]
        if period is None or not costs:
            skipped |= similar
            continue
        counted = together
        cost_ms = median(costs)
        late, rate = period.late_steps(most, cost_ms / 2)
        if rate > rate_before:
            yield PeriodicEvent(cost_ms, rate - rate_before), late
            rate_before = rate


def _long_gaps(same: Sequence[RankSamples], steps: range) -> MsByStep:
    # By how much gaps exceed the usual gap of their slot. A slot whose host waits for its devices
    # has a gap in most of every step, another slot has none.
    found: MsByStep = {}
    for one, own in zip(same, _steps_by_variant(same, steps), strict=True):
        gaps = {step: one.host_gaps_ms[step] for step in own}
        if gaps and one.step_ms:
            every = [*gaps.values()]
            usual = median(every)
            least = max(MIN_GAP_FRACTION * median(one.step_ms), DEVIATIONS * mad_deviation(every))
            found |= {step: ms - usual for step, ms in gaps.items() if ms - usual > least}
    return found


def _steps_by_variant(same: Sequence[RankSamples], steps: range) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in same]
    windows = sorted(
        (w.first_step, w.steps, of) for of, one in enumerate(same) for w in one.windows
    )
    begun = steps.start
    for first, count, of in windows:
        end = min(first + count, steps.stop)
        found[of].extend(range(begun, end))
        begun = max(begun, end)
    if windows:
        found[windows[-1][2]].extend(range(begun, steps.stop))
    return found


def _excess(same: Sequence[RankSamples], flagged: Collection[int]) -> MsByStep:
    found: MsByStep = {}
    for one in same:
        timed = dict(_numbered_step_ms(one))
        others = [ms for step, ms in timed.items() if step not in flagged]
        usual = median(others or list(timed.values()))
        found |= {step: ms - usual for step, ms in timed.items()}
    return found


def _numbered_step_ms(rank: RankSamples) -> Iterator[tuple[int, float]]:
    return (
        (w.first_step + n, ms)
        for w, step_ms in rank.windows_with_step_times()
        for n, ms in enumerate(step_ms)
    )


def _similar_gaps(gaps: MsByStep) -> list[set[int]]:
    found: list[set[int]] = []
    before = 0.0
    for ms, step in sorted((ms, step) for step, ms in gaps.items()):
        if not found or ms > SIMILAR_RATIO * before:
            found.append(set())
        found[-1].add(step)
        before = ms
    return found[::-1]


def _rank_without_steps(rank: RankSamples, affected_steps: frozenset[int]) -> RankSamples:
    windows: list[Window] = []
    kept_ms: list[float] = []
    for window, step_ms in rank.windows_with_step_times():
        pairs = list(enumerate(step_ms, start=window.first_step))
        own = [ms for step, ms in pairs if step not in affected_steps]
        if own:
            out_s = sum(ms for step, ms in pairs if step in affected_steps) / 1e3
            samples = round(window.samples * len(own) / window.steps)
            numbered = enumerate(window.batch_indices, start=window.first_step)
            windows.append(
                dataclasses.replace(
                    window,
                    seconds=window.seconds - out_s,
                    steps=len(own),
                    samples=samples,
                    batch_indices=tuple(i for step, i in numbered if step not in affected_steps),
                )
            )
            kept_ms += own
    return dataclasses.replace(rank, windows=tuple(windows), step_ms=tuple(kept_ms))


# Steps with a period. A script counts them through the whole training, or anew in every epoch.


@dataclass(frozen=True)
class ObservedSteps:
    """The observed steps, and the first steps of epochs among all steps."""

    steps: range
    epoch_starts: tuple[int, ...] = ()

    def step_in_epoch(self, step: int) -> int:
        """Return the steps of the same epoch before ``step``."""
        epoch = bisect_right(self.epoch_starts, step)
        return step - (self.epoch_starts[epoch - 1] if epoch else 0)


@dataclass(frozen=True)
class PeriodicSteps:
    """The steps that periodic work may precede.

    ``known`` are the ordered steps after long gaps, ``between`` the other steps of the period
    between the first and the last of them, or of all epochs; ``outside`` are further steps.
    ``observed`` is the number of observed steps if the period begins anew in every epoch.
    """

    known: Sequence[int]
    between: Sequence[int]
    outside: Sequence[int] = ()
    observed: int | None = None

    def late_steps(self, excess: Mapping[int, float], least_ms: float) -> tuple[set[int], float]:
        """Return the late steps and their rate.

        A step of the period that exceeds the usual step by ``least_ms`` is late too. Among steps
        that were not timed, the same fraction is late as among the timed ones.
        """
        late = {at for at in (*self.between, *self.outside) if excess.get(at, 0.0) > least_ms}
        timed = [at for at in self.between if at in excess]
        part = sum(at in late for at in timed) / max(1, len(timed))
        late |= {*self.known}
        count = len(late) + part * (len(self.between) - len(timed))
        if self.observed is not None:
            return late, count / self.observed
        return late, (count - 1) / (max(late) - min(late))


def find_period(ordered: Sequence[int], observed: ObservedSteps) -> PeriodicSteps | None:
    """Return the period of most of these steps; None if they look random."""
    return _constant_period(ordered, observed.steps) or _period_per_epoch(ordered, observed)


def _constant_period(ordered: Sequence[int], steps: range) -> PeriodicSteps | None:
    """Return the distance of most steps, or its divisor: a host that never waits has no gap.

    Two steps always have a distance: it must count from the first step of the script, or from 0
    if the first backward passes were not observed as steps.
    """
    distances = [after - step for step, after in pairwise(ordered)]
    for period in sorted({*distances} - AMBIGUOUS_PERIODS, reverse=True):
        multiples = sum(distance % period == 0 for distance in distances)
        regular = multiples >= REGULAR_FRACTION * len(distances)
        enough = len(ordered) >= OBSERVED_FRACTION * (len(steps) // period)
        from_start = (ordered[0] + UNCOUNTED_STEPS) % period <= UNCOUNTED_STEPS + 1
        if regular and enough and (len(ordered) > MIN_EVENTS or from_start):
            # Other distances are of epochs, in which the script counts anew.
            same = [pair for pair in pairwise(ordered) if (pair[1] - pair[0]) % period == 0]
            between = [at for first, last in same for at in range(first + period, last, period)]
            before = range(ordered[0] - period, steps.start - 1, -period)
            after = range(ordered[-1] + period, steps.stop, period)
            return PeriodicSteps(ordered, between, (*before, *after))
    return None


def _period_per_epoch(ordered: Sequence[int], observed: ObservedSteps) -> PeriodicSteps | None:
    if not observed.epoch_starts or len(ordered) <= MIN_EVENTS:
        return None
    places = [observed.step_in_epoch(step) for step in ordered]
    distances = {after - place for place, after in pairwise(places) if after > place}
    for period in sorted(distances - AMBIGUOUS_PERIODS, reverse=True):
        ((remainder, count),) = Counter(place % period for place in places).most_common(1)
        every = [
            step
            for step in observed.steps
            if (place := observed.step_in_epoch(step)) and place % period == remainder
        ]
        regular = count >= REGULAR_FRACTION * len(ordered)
        if regular and len(ordered) >= OBSERVED_FRACTION * len(every):
            between = sorted({*every} - {*ordered})
            return PeriodicSteps(ordered, between, observed=len(observed.steps))
    return None
