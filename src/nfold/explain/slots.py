"""Steps at one distance from each other, as of what a script does after every so many.

Who counts may do so through the whole training, or anew in every pass over the data. Pure
functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

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
    """These and the late ones, and how many there may be of those that were not timed."""
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
    """At a distance from the first steps of passes, of which there are several."""
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
