"""What a script does between its steps, and not between all of them. Pure functions.

An evaluation, a checkpoint, a log every so many steps: the host's pause before a step is then
unlike the usual one (by the median and the median absolute deviation: F. R. Hampel, The Influence
Curve, JASA 69, 1974). That says only which steps these are. What they take more than others is by
the clock of their devices, which may have had enough to do meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nfold.explain.readings import Readings
from nfold.explain.rung import Rung
from nfold.explain.slots import OFTEN, Passes, slots_of
from nfold.measurement import Measurement, RankSamples, Window
from nfold.stats import deviation, median, middle

LEAST = 0.1
"""Of a step: what is shorter is no pause, whatever the usual one is."""
DEVIATIONS = 5.0
"""By so many is a pause longer than the usual one."""
ALIKE = 2.0
"""A pause that is more than so many times as long as the next shorter one is of another kind."""
LEAST_PART = 0.005
"""Of a step: what costs less is not told."""
Steps = dict[int, float]
"""Milliseconds by the number of a step."""


@dataclass(frozen=True)
class Kind:
    """Pauses that are alike: by how much a step is longer after one, and in how many it is so."""

    cost_ms: float
    rate: float


@dataclass(frozen=True)
class Recurring:
    """What recurs in a process tree that was watched for so many ``steps``: those ``apart`` come
    after it.
    """

    steps: int
    apart: frozenset[int] = frozenset()
    kinds: tuple[Kind, ...] = ()

    @property
    def ms(self) -> float:
        """Of every step, on average."""
        return sum(kind.rate * kind.cost_ms for kind in self.kinds)

    @property
    def every(self) -> float | None:
        """The steps from one pause to the next, of the kind that costs most."""
        most = max(self.kinds, key=lambda kind: kind.rate * kind.cost_ms, default=None)
        return None if most is None else 1 / most.rate

    @property
    def rarest(self) -> float:
        """The same of the kind that comes least often."""
        return max((1 / kind.rate for kind in self.kinds), default=0.0)


def recurring(members: Mapping[Rung, Measurement]) -> dict[Rung, Recurring]:
    """Of rungs that shared a process tree, those where it is known when batches were asked for.

    A run in whole epochs counts what lies in no window by itself.
    """
    found: dict[tuple[tuple[float, ...], ...], dict[Rung, Measurement]] = {}
    for rung, one in members.items():
        watched = tuple(rank.pauses_ms for rank in one.ranks)
        timed = one.status == "ok" and all(rank.step_ms for rank in one.ranks)
        if watched and all(watched) and timed and one.plan.epochs is None:
            found.setdefault(watched, {})[rung] = one
    return {rung: made for same in found.values() for rung, made in _of_processes(same).items()}


def again(one: Recurring | None, others: Iterable[Recurring]) -> Readings:
    """The readings of a tree, if it was watched long enough for what recurs in ``others``."""
    rarest = max((other.rarest for other in others), default=0.0)
    if one is None or (not one.kinds and one.steps < OFTEN * rarest):
        return {}
    every = one.every
    return {"recurring": one.ms, **({} if every is None else {"every": every})}


def between(measurement: Measurement, recurs: Recurring | None) -> Readings:
    """The reading of what its host does before the other steps, where anybody can tell."""
    apart = recurs.apart if recurs is not None else ()
    each = [
        [rank.pauses_ms[step] for step, _ in _timed(rank) if step not in apart]
        for rank in measurement.ranks
        if rank.pauses_ms
    ]
    known = measurement.ranks and len(each) == len(measurement.ranks) and all(each)
    return {"pause": min(map(middle, each))} if known else {}


def without(measurement: Measurement, recurs: Recurring | None) -> Measurement:
    """Its windows less the steps apart, on all ranks alike; all, where no others are left."""
    if recurs is None or not recurs.apart:
        return measurement
    ranks = tuple(_without(rank, recurs.apart) for rank in measurement.ranks)
    left = all(rank.windows for rank in ranks)
    return dataclasses.replace(measurement, ranks=ranks) if left else measurement


def _of_processes(members: Mapping[Rung, Measurement]) -> dict[Rung, Recurring]:
    """Of rungs that the same processes ran.

    Several ranks may come late for one thing, or wait for the one that does: that is told once, as
    it is on the rank that is delayed most.
    """
    ranks = [list(same) for same in zip(*(one.ranks for one in members.values()), strict=True)]
    last = min(len(same[0].pauses_ms) for same in ranks)
    step_ms = median([ms for same in ranks for one in same for ms in one.step_ms])
    steps = range(ranks[0][0].warmup_steps, last)
    pauses = [_unusual(same, steps) for same in ranks]
    excess = [_excess(same, own) for same, own in zip(ranks, pauses, strict=True)]
    # One that waits for a rank which is between two passes is late in a step, and that rank is not.
    most = {step: max(one.get(step, 0.0) for one in excess) for step in excess[0]}
    triples = zip(ranks, pauses, excess, strict=True)
    found = [
        one
        for same, own, more in triples
        for one in _of_rank(own, more, most, Passes(steps, same[0].pass_starts))
    ]
    kinds: list[Kind] = []
    taken: list[set[int]] = []
    for kind, late in sorted(found, key=lambda one: -one[0].rate * one[0].cost_ms):
        told = any(2 * len(late & other) > len(late) for other in taken)
        if not told and kind.rate * kind.cost_ms > LEAST_PART * step_ms:
            kinds.append(kind)
            taken.append(late)
    return dict.fromkeys(members, Recurring(len(steps), frozenset().union(*taken), tuple(kinds)))


def _of_rank(
    pauses: Steps, excess: Steps, most: Steps, passes: Passes
) -> Iterator[tuple[Kind, set[int]]]:
    """Every kind of one rank's pauses, the longest first, and the steps that come after it.

    What comes every 10 steps comes after every 50 too, within what comes then: so kinds are
    counted together with the longer ones, which are then taken away. Those at no distance may be of
    the next kind: a pause lasts until the devices are done, and how far they are behind depends on
    the turn.
    """
    counted, passed, before = set[int](), set[int](), 0.0
    for seen in _alike(pauses):
        choices = (counted | seen, counted | seen | passed)
        found = [(slots_of(sorted(one), passes), one) for one in choices]
        slots, together = next((pair for pair in found if pair[0]), (None, counted))
        costs = [excess[step] for step in together - counted if step in excess]
        if slots is None or not costs:
            passed |= seen
            continue
        counted = together
        cost_ms = median(costs)
        late, rate = slots.late(sorted(together), most, cost_ms / 2)
        if rate > before:
            yield Kind(cost_ms, rate - before), late
            before = rate


def _unusual(same: Sequence[RankSamples], steps: range) -> Steps:
    """By how much the pauses before these steps are longer than is usual in their turn.

    A turn whose host waits for its devices pauses for most of every step, another one never.
    """
    found: Steps = {}
    for one, own in zip(same, _shared(same, steps), strict=True):
        pauses = {step: one.pauses_ms[step] for step in own}
        if pauses and one.step_ms:
            every = [*pauses.values()]
            usual = median(every)
            least = max(LEAST * median(one.step_ms), DEVIATIONS * deviation(every))
            found |= {step: ms - usual for step, ms in pauses.items() if ms - usual > least}
    return found


def _shared(same: Sequence[RankSamples], steps: range) -> list[list[int]]:
    """The steps of each: of its windows, and of what was not counted before them."""
    found: list[list[int]] = [[] for _ in same]
    windows = sorted((w.first, w.steps, of) for of, one in enumerate(same) for w in one.windows)
    begun = steps.start
    for first, count, of in windows:
        end = min(first + count, steps.stop)
        found[of].extend(range(begun, end))
        begun = max(begun, end)
    if windows:
        found[windows[-1][2]].extend(range(begun, steps.stop))
    return found


def _excess(same: Sequence[RankSamples], flagged: Collection[int]) -> Steps:
    """By how many milliseconds the timed steps of one rank are longer than others of its turn."""
    found: Steps = {}
    for one in same:
        timed = dict(_timed(one))
        others = [ms for step, ms in timed.items() if step not in flagged]
        usual = median(others or list(timed.values()))
        found |= {step: ms - usual for step, ms in timed.items()}
    return found


def _timed(rank: RankSamples) -> Iterator[tuple[int, float]]:
    """Milliseconds of every step, by its number in its process."""
    return ((w.first + n, ms) for w, step_ms in rank.timed() for n, ms in enumerate(step_ms))


def _alike(pauses: Steps) -> list[set[int]]:
    """The steps of each kind, those after the longest pauses first."""
    found: list[set[int]] = []
    before = 0.0
    for ms, step in sorted((ms, step) for step, ms in pauses.items()):
        if not found or ms > ALIKE * before:
            found.append(set())
        found[-1].add(step)
        before = ms
    return found[::-1]


def _without(rank: RankSamples, apart: frozenset[int]) -> RankSamples:
    windows: list[Window] = []
    kept_ms: list[float] = []
    for window, step_ms in rank.timed():
        pairs = list(enumerate(step_ms, start=window.first))
        own = [ms for step, ms in pairs if step not in apart]
        if own:
            out_s = sum(ms for step, ms in pairs if step in apart) / 1e3
            samples = round(window.samples * len(own) / window.steps)
            windows.append(
                dataclasses.replace(
                    window, seconds=window.seconds - out_s, steps=len(own), samples=samples
                )
            )
            kept_ms += own
    return dataclasses.replace(rank, windows=tuple(windows), step_ms=tuple(kept_ms))
