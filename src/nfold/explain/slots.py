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

OFTEN = 2
"""Pauses of a kind; what was there once may have been anything."""
EVEN = 0.75
"""Of all distances from one pause to the next, multiples of one; else they are chance."""
SEEN = 0.5
"""Of the pauses that there would be at one distance, at least."""
UNCOUNTED = 2
"""Backwards before nobody waits for an optimizer any more: the script has counted them."""
UNKNOWABLE = {1, 2}
"""Of what comes after every second step nobody can say which of the two is usual."""


@dataclass(frozen=True)
class Passes:
    """The steps that are looked at, and which of all steps passes over the data began with."""

    steps: range
    starts: tuple[int, ...] = ()

    def place(self, step: int) -> int:
        """How many steps its pass had before it."""
        pass_ = bisect_right(self.starts, step)
        return step - (self.starts[pass_ - 1] if pass_ else 0)


class Slots(Protocol):
    """Steps that something may come before."""

    def late(
        self, ordered: Sequence[int], excess: Mapping[int, float], least_ms: float
    ) -> tuple[set[int], float]:
        """All steps after the pauses before ``ordered`` ones, those too that are so late where none
        was seen; how many of all are.

        Of what may lie in between and was not timed, as large a part is late as of what was.
        """


def slots_of(ordered: Sequence[int], passes: Passes) -> Slots | None:
    """Those that most of these steps are; None where they came by chance."""
    return _throughout(ordered, passes.steps) or _anew(ordered, passes)


@dataclass(frozen=True)
class Throughout:
    """At a distance from the one before, and from the next."""

    steps: range
    distance: int

    def late(
        self, ordered: Sequence[int], excess: Mapping[int, float], least_ms: float
    ) -> tuple[set[int], float]:
        """Where distances are multiples; passes over the data may count anew."""
        one = self.distance
        pairs = [(step, after) for step, after in pairwise(ordered) if (after - step) % one == 0]
        inside = [at for step, after in pairs for at in range(step + one, after, one)]
        before = range(ordered[0] - one, self.steps.start - 1, -one)
        outside = [*before, *range(ordered[-1] + one, self.steps.stop, one)]
        every, unseen = _late(ordered, inside, outside, excess, least_ms)
        return every, (len(every) + unseen - 1) / (max(every) - min(every))


@dataclass(frozen=True)
class Anew:
    """At the same places of every pass."""

    steps: range
    slots: tuple[int, ...]

    def late(
        self, ordered: Sequence[int], excess: Mapping[int, float], least_ms: float
    ) -> tuple[set[int], float]:
        """Of all that there are."""
        inside = sorted({*self.slots} - {*ordered})
        every, unseen = _late(ordered, inside, (), excess, least_ms)
        return every, (len(every) + unseen) / len(self.steps)


def _late(
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


def _throughout(ordered: Sequence[int], steps: range) -> Throughout | None:
    """At the distance at which most of these come, or at multiples of it: a host that does not wait
    for its devices has no pause.

    Two have a distance anyway: theirs counts from the script's first step, or from 0, also where
    its first ones were no steps yet.
    """
    distances = [after - step for step, after in pairwise(ordered)]
    for one in sorted({*distances} - UNKNOWABLE, reverse=True):
        even = sum(distance % one == 0 for distance in distances) >= EVEN * len(distances)
        enough = len(ordered) >= SEEN * (len(steps) // one)
        if even and enough and (len(ordered) > OFTEN or _begins(ordered[0], one)):
            return Throughout(steps, one)
    return None


def _begins(first: int, distance: int) -> bool:
    return (first + UNCOUNTED) % distance <= UNCOUNTED + 1


def _anew(ordered: Sequence[int], passes: Passes) -> Anew | None:
    """At a distance from the first steps of passes, of which there are several."""
    places = [(passes.place(step), passes.place(after)) for step, after in pairwise(ordered)]
    distances = {after - step for step, after in places if after > step}
    if not passes.starts or len(ordered) <= OFTEN:
        return None
    for one in sorted(distances - UNKNOWABLE, reverse=True):
        rests = Counter(passes.place(step) % one for step in ordered)
        ((rest, count),) = rests.most_common(1)
        every = tuple(s for s in passes.steps if (at := passes.place(s)) and at % one == rest)
        if count >= EVEN * len(ordered) and len(ordered) >= SEEN * len(every):
            return Anew(passes.steps, every)
    return None
