"""What a script does between its steps, and not between all of them. Pure functions.

An evaluation, a checkpoint, a log every so many steps: the host's pause before a step is then
unlike the usual one (by the median and the median absolute deviation: F. R. Hampel, The Influence
Curve, JASA 69, 1974). That says only which steps these are. What they take more than others is by
the clock of their devices, which may have had enough to do meanwhile.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from nfold.core.measurement import Measurement, RankSamples, Window
from nfold.core.stats import mad_deviation, median, midmean
from nfold.explain.design import Trial
from nfold.explain.metrics import Metrics

MIN_GAP_FRACTION = 0.1
"""Of a step: what is shorter is no pause, whatever the usual one is."""
DEVIATIONS = 5.0
"""By so many is a pause longer than the usual one."""
SIMILAR_RATIO = 2.0
"""A pause that is more than so many times as long as the next shorter one is of another kind."""
MIN_COST_FRACTION = 0.005
"""Of a step: what costs less is not told."""
MsByStep = dict[int, float]
"""Milliseconds by the number of a step."""


@dataclass(frozen=True)
class PeriodicEvent:
    """Pauses that are alike: by how much a step is longer after one, and in how many it is so."""

    cost_ms: float
    rate: float


@dataclass(frozen=True)
class PeriodicWork:
    """What recurs in a process tree that was watched for so many ``steps``: those ``apart`` come
    after it.
    """

    steps: int
    affected_steps: frozenset[int] = frozenset()
    events: tuple[PeriodicEvent, ...] = ()

    @property
    def ms_per_step(self) -> float:
        """Of every step, on average."""
        return sum(kind.rate * kind.cost_ms for kind in self.events)

    @property
    def period(self) -> float | None:
        """The steps from one pause to the next, of the kind that costs most."""
        most = max(self.events, key=lambda kind: kind.rate * kind.cost_ms, default=None)
        return None if most is None else 1 / most.rate

    @property
    def longest_period(self) -> float:
        """The same of the kind that comes least often."""
        return max((1 / kind.rate for kind in self.events), default=0.0)


def find_periodic_work(members: Mapping[Trial, Measurement]) -> dict[Trial, PeriodicWork]:
    """Of rungs that shared a process tree, those where it is known when batches were asked for.

    A run in whole epochs counts what lies in no window by itself.
    """
    found: dict[tuple[tuple[float, ...], ...], dict[Trial, Measurement]] = {}
    for rung, one in members.items():
        watched = tuple(rank.host_gaps_ms for rank in one.ranks)
        timed = one.status == "ok" and all(rank.step_ms for rank in one.ranks)
        if watched and all(watched) and timed and one.plan.epochs is None:
            found.setdefault(watched, {})[rung] = one
    return {
        rung: made
        for same in found.values()
        for rung, made in _periodic_work_of_processes(same).items()
    }


def periodic_metrics(work: PeriodicWork | None, others: Iterable[PeriodicWork]) -> Metrics:
    """The readings of a tree, if it was watched long enough for what recurs in ``others``."""
    rarest = max((other.longest_period for other in others), default=0.0)
    if work is None or (not work.events and work.steps < MIN_EVENTS * rarest):
        return {}
    every = work.period
    return {"recurring": work.ms_per_step, **({} if every is None else {"every": every})}


def host_gap_metrics(measurement: Measurement, periodic: PeriodicWork | None) -> Metrics:
    """The reading of what its host does before the other steps, where anybody can tell."""
    apart = periodic.affected_steps if periodic is not None else ()
    each = [
        [rank.host_gaps_ms[step] for step, _ in _numbered_step_ms(rank) if step not in apart]
        for rank in measurement.ranks
        if rank.host_gaps_ms
    ]
    known = measurement.ranks and len(each) == len(measurement.ranks) and all(each)
    return {"pause": min(map(midmean, each))} if known else {}


def without_affected_steps(measurement: Measurement, periodic: PeriodicWork | None) -> Measurement:
    """Its windows less the steps apart, on all ranks alike; all, where no others are left."""
    if periodic is None or not periodic.affected_steps:
        return measurement
    ranks = tuple(_rank_without_steps(rank, periodic.affected_steps) for rank in measurement.ranks)
    left = all(rank.windows for rank in ranks)
    return dataclasses.replace(measurement, ranks=ranks) if left else measurement


def _periodic_work_of_processes(members: Mapping[Trial, Measurement]) -> dict[Trial, PeriodicWork]:
    """Of rungs that the same processes ran.

    Several ranks may come late for one thing, or wait for the one that does: that is told once, as
    it is on the rank that is delayed most.
    """
    ranks = [list(same) for same in zip(*(one.ranks for one in members.values()), strict=True)]
    last = min(len(same[0].host_gaps_ms) for same in ranks)
    step_ms = median([ms for same in ranks for one in same for ms in one.step_ms])
    steps = range(ranks[0][0].warmup_steps, last)
    pauses = [_long_gaps(same, steps) for same in ranks]
    excess = [_excess(same, own) for same, own in zip(ranks, pauses, strict=True)]
    # One that waits for a rank which is between two passes is late in a step, and that rank is not.
    most = {step: max(one.get(step, 0.0) for one in excess) for step in excess[0]}
    triples = zip(ranks, pauses, excess, strict=True)
    found = [
        one
        for same, own, more in triples
        for one in _events_of_rank(own, more, most, ObservedSteps(steps, same[0].epoch_starts))
    ]
    kinds: list[PeriodicEvent] = []
    taken: list[set[int]] = []
    for kind, late in sorted(found, key=lambda one: -one[0].rate * one[0].cost_ms):
        told = any(2 * len(late & other) > len(late) for other in taken)
        if not told and kind.rate * kind.cost_ms > MIN_COST_FRACTION * step_ms:
            kinds.append(kind)
            taken.append(late)
    return dict.fromkeys(members, PeriodicWork(len(steps), frozenset().union(*taken), tuple(kinds)))


def _events_of_rank(
    gaps: MsByStep, excess: MsByStep, most: MsByStep, observed: ObservedSteps
) -> Iterator[tuple[PeriodicEvent, set[int]]]:
    """Every kind of one rank's pauses, the longest first, and the steps that come after it.

    What comes every 10 steps comes after every 50 too, within what comes then: so kinds are
    counted together with the longer ones, which are then taken away. Those at no distance may be of
    the next kind: a pause lasts until the devices are done, and how far they are behind depends on
    the turn.
    """
    counted, passed, before = set[int](), set[int](), 0.0
    for seen in _similar_gaps(gaps):
        choices = (counted | seen, counted | seen | passed)
        found = [(find_period(sorted(one), observed), one) for one in choices]
        slots, together = next((pair for pair in found if pair[0]), (None, counted))
        costs = [excess[step] for step in together - counted if step in excess]
        if slots is None or not costs:
            passed |= seen
            continue
        counted = together
        cost_ms = median(costs)
        late, rate = slots.late_steps(sorted(together), most, cost_ms / 2)
        if rate > before:
            yield PeriodicEvent(cost_ms, rate - before), late
            before = rate


def _long_gaps(same: Sequence[RankSamples], steps: range) -> MsByStep:
    """By how much the pauses before these steps are longer than is usual in their turn.

    A turn whose host waits for its devices pauses for most of every step, another one never.
    """
    found: MsByStep = {}
    for one, own in zip(same, _steps_by_variant(same, steps), strict=True):
        pauses = {step: one.host_gaps_ms[step] for step in own}
        if pauses and one.step_ms:
            every = [*pauses.values()]
            usual = median(every)
            least = max(MIN_GAP_FRACTION * median(one.step_ms), DEVIATIONS * mad_deviation(every))
            found |= {step: ms - usual for step, ms in pauses.items() if ms - usual > least}
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
            windows.append(
                dataclasses.replace(
                    window, seconds=window.seconds - out_s, steps=len(own), samples=samples
                )
            )
            kept_ms += own
    return dataclasses.replace(rank, windows=tuple(windows), step_ms=tuple(kept_ms))


# Steps at one distance from each other, as of what a script does after every so many.
#
# Who counts may do so through the whole training, or anew in every pass over the data. Pure
# functions.

MIN_EVENTS = 2
"""Pauses of a kind; what was there once may have been anything."""
REGULAR_FRACTION = 0.75
"""Of all distances from one pause to the next, multiples of one; else they are chance."""
OBSERVED_FRACTION = 0.5
"""Of the pauses that there would be at one distance, at least."""
UNCOUNTED_STEPS = 2
"""Backwards before nobody waits for an optimizer any more: the script has counted them."""
AMBIGUOUS_PERIODS = {1, 2}
"""Of what comes after every second step nobody can say which of the two is usual."""


@dataclass(frozen=True)
class ObservedSteps:
    """The steps that are looked at, and which of all steps passes over the data began with."""

    steps: range
    epoch_starts: tuple[int, ...] = ()

    def step_in_epoch(self, step: int) -> int:
        """How many steps its pass had before it."""
        pass_ = bisect_right(self.epoch_starts, step)
        return step - (self.epoch_starts[pass_ - 1] if pass_ else 0)


class PeriodicSteps(Protocol):
    """Steps that something may come before."""

    def late_steps(
        self, ordered: Sequence[int], excess: Mapping[int, float], least_ms: float
    ) -> tuple[set[int], float]:
        """All steps after the pauses before ``ordered`` ones, those too that are so late where none
        was seen; how many of all are.

        Of what may lie in between and was not timed, as large a part is late as of what was.
        """


def find_period(ordered: Sequence[int], observed: ObservedSteps) -> PeriodicSteps | None:
    """Those that most of these steps are; None where they came by chance."""
    return _constant_period(ordered, observed.steps) or _period_per_epoch(ordered, observed)


@dataclass(frozen=True)
class ConstantPeriod:
    """At a distance from the one before, and from the next."""

    steps: range
    period: int

    def late_steps(
        self, ordered: Sequence[int], excess: Mapping[int, float], least_ms: float
    ) -> tuple[set[int], float]:
        """Where distances are multiples; passes over the data may count anew."""
        one = self.period
        pairs = [(step, after) for step, after in pairwise(ordered) if (after - step) % one == 0]
        inside = [at for step, after in pairs for at in range(step + one, after, one)]
        before = range(ordered[0] - one, self.steps.start - 1, -one)
        outside = [*before, *range(ordered[-1] + one, self.steps.stop, one)]
        every, unseen = _late_steps(ordered, inside, outside, excess, least_ms)
        return every, (len(every) + unseen - 1) / (max(every) - min(every))


@dataclass(frozen=True)
class PeriodPerEpoch:
    """At the same places of every pass."""

    steps: range
    event_steps: tuple[int, ...]

    def late_steps(
        self, ordered: Sequence[int], excess: Mapping[int, float], least_ms: float
    ) -> tuple[set[int], float]:
        """Of all that there are."""
        inside = sorted({*self.event_steps} - {*ordered})
        every, unseen = _late_steps(ordered, inside, (), excess, least_ms)
        return every, (len(every) + unseen) / len(self.steps)


def _late_steps(
    ordered: Sequence[int],
    inside: Sequence[int],
    outside: Sequence[int],
    excess: Mapping[int, float],
    least_ms: float,
) -> tuple[set[int], float]:
    late = {at for at in (*inside, *outside) if excess.get(at, 0.0) > least_ms}
    timed = [at for at in inside if at in excess]
    part = sum(at in late for at in timed) / max(1, len(timed))
    return late.union(ordered), part * (len(inside) - len(timed))


def _constant_period(ordered: Sequence[int], steps: range) -> ConstantPeriod | None:
    """At the distance at which most of these come, or at multiples of it: a host that does not wait
    for its devices has no pause.

    Two have a distance anyway: theirs counts from the script's first step, or from 0, also where
    its first ones were no steps yet.
    """
    distances = [after - step for step, after in pairwise(ordered)]
    for one in sorted({*distances} - AMBIGUOUS_PERIODS, reverse=True):
        even = sum(distance % one == 0 for distance in distances) >= REGULAR_FRACTION * len(
            distances
        )
        enough = len(ordered) >= OBSERVED_FRACTION * (len(steps) // one)
        if even and enough and (len(ordered) > MIN_EVENTS or _counts_from_start(ordered[0], one)):
            return ConstantPeriod(steps, one)
    return None


def _counts_from_start(first: int, period: int) -> bool:
    return (first + UNCOUNTED_STEPS) % period <= UNCOUNTED_STEPS + 1


def _period_per_epoch(ordered: Sequence[int], observed: ObservedSteps) -> PeriodPerEpoch | None:
    places = [
        (observed.step_in_epoch(step), observed.step_in_epoch(after))
        for step, after in pairwise(ordered)
    ]
    distances = {after - step for step, after in places if after > step}
    if not observed.epoch_starts or len(ordered) <= MIN_EVENTS:
        return None
    for one in sorted(distances - AMBIGUOUS_PERIODS, reverse=True):
        rests = Counter(observed.step_in_epoch(step) % one for step in ordered)
        ((rest, count),) = rests.most_common(1)
        every = tuple(
            s for s in observed.steps if (at := observed.step_in_epoch(s)) and at % one == rest
        )
        if count >= REGULAR_FRACTION * len(ordered) and len(ordered) >= OBSERVED_FRACTION * len(
            every
        ):
            return PeriodPerEpoch(observed.steps, every)
    return None
