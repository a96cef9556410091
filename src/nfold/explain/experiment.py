"""The experiment: which rungs are run, in which order, how often, until the time is over.

What a first look has seen happen comes first, before what shares process trees with both ends. On
one device the fixes of what takes more than half of its step follow at once. Then rounds over
all rungs, each in a random order of its own, so that drift meets all alike. What the first round
shows asks for further rungs (fixes, causes taken away together, other batches), which come first in
the next; later rounds repeat the rungs of the row whose interval is widest. On a host that is now
faster and now slower another process tree of the real run comes before them.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from nfold.errors import RunFailure
from nfold.explain import asking
from nfold.explain.clocks import clocks
from nfold.explain.ends import ends
from nfold.explain.ladder import Ladder
from nfold.explain.lengths import long_enough, turns_s
from nfold.explain.measured import Measured, reason_of
from nfold.explain.own_batches import of_its_own, telling
from nfold.explain.pausing import known
from nfold.explain.readings import readings
from nfold.explain.rung import Rung
from nfold.explain.target import Target
from nfold.measurement import Measurement
from nfold.plan import LONG_STEP_S
from nfold.run.options import Stop

PILOT_STEPS = 30
MOST_ROUNDS = 6
OVER = 1.2
"""Of the time that is left: what nobody has measured yet may take a little more."""
LONGEST_LOOK_S = 300.0
"""Of a first look, with all that is before a script's first step; or twice the time budget."""


class Events:
    """What an experiment tells while it goes on. This base listens to nothing."""

    def started(self, rungs: Sequence[Rung], number: int, left_s: float) -> None:
        """A run of these begins; ``number`` is its round."""

    def finished(
        self, rungs: Sequence[Rung], number: int, found: Sequence[Measurement], left_s: float
    ) -> None:
        """It has ended, well or not, or they were measured before."""


@dataclass
class Clock:
    """The time budget, in seconds."""

    budget_s: float
    now: Callable[[], float] = time.monotonic
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.now()

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self.budget_s - (self.now() - self.began))


@dataclass
class Experiment:
    """One explanation while its runs go on."""

    target: Target
    clock: Clock
    events: Events
    stop: Stop = field(default_factory=Stop)
    measured: Measured = field(default_factory=Measured)
    _by_itself: set[Rung] = field(default_factory=set)
    _tried_again: set[Rung] = field(default_factory=set)
    _failed: dict[Rung, str] = field(default_factory=dict)
    _finds_unused: bool = False
    _step_s: float = 0.0

    def run(self, ladder: Ladder) -> Ladder:
        """Measure; the ladder with the length of its runs, what a script does between its steps
        and the clocks of its devices.

        Raises RunFailure without a result.
        """
        if ladder.seen is not None:
            self.target = self.target.knowing(ladder.seen)
        ladder = self._long_enough(ladder)
        self._finds_unused = ladder.seen is not None and ladder.seen.find_unused_parameters
        wanted, evident = list(asking.wanted(ladder)), list(asking.evident(ladder))
        # What a first look has seen happen does not wait for the turns of all the others.
        self._need(ladder, (ladder.full(), ladder.one), evident or wanted)
        fixes = asking.urgent(ladder, self.measured)
        self._round(self._fitting(fixes), 0, fixes)
        epochs = ends(ladder, self.measured, self.target.epoch_steps, self.clock.budget_s)
        ahead = [*evident, *telling(ladder)]
        first = [*ahead, *wanted, *epochs]
        failing = functools.partial(of_its_own, ladder, self.measured, self._failed)
        self._round(self._fitting(first), 0, ahead, until=failing)
        own = failing()
        if own is not None:
            self.measured = Measured()
            return self.run(own)
        self._round(first, 0)
        for number in range(1, MOST_ROUNDS):
            follow_ups = asking.follow_ups(ladder, self.measured)
            rungs = self._next(ladder, [*first, *follow_ups], number)
            asked = dict.fromkeys([*follow_ups, *rungs])
            new = [rung for rung in asked if not self.measured.tried(rung)]
            if number == 1 and "unsteady" in self.measured.varied():
                new = [ladder.full(), *new]
            if self.stop or not (rungs or new) or not self._round([*new, *rungs], number, new):
                break
        found = clocks(self.measured.every(), ladder.devices)
        return dataclasses.replace(known(ladder, self.measured.every()), clocks=found)

    def attempt(self, rung: Rung, *, anew: bool = False) -> Measurement:
        """One run that is no part of the ladder, whatever time is left; it may fail."""
        found = None if anew else self.target.known(rung, 0)
        if found is None:
            self.events.started([rung], 0, self.clock.left_s)
            limit_s = max(LONGEST_LOOK_S, 2 * self.clock.budget_s)
            found = self.target.measure(rung, 0, limit_s)
        self.events.finished([rung], 0, [found], self.clock.left_s)
        return found

    def _long_enough(self, ladder: Ladder) -> Ladder:
        """Steps for all rungs, by a short run where nobody knows how long one takes."""
        step_s = self._step_s = (ladder.step_ms or self._pilot_ms(ladder)) / 1e3
        by_itself = Rung(plan=ladder.plan.edit(steps=1, epochs=None))
        return long_enough(ladder, step_s, in_turns=self.target.together(by_itself) is not None)

    def _pilot_ms(self, ladder: Ladder) -> float:
        pilot = Rung(plan=ladder.plan.edit(steps=PILOT_STEPS, epochs=None))
        self._need(ladder, [pilot])
        (found,) = self.measured.runs.pop(pilot).values()
        return readings(found, coupled=True)["step"]

    def _round(
        self,
        rungs: Iterable[Rung],
        number: int,
        first: Collection[Rung] = (),
        until: Callable[[], object] = lambda: None,
    ) -> bool:
        """Every rung once, as long as ``until`` says nothing; whether any was run or known.

        What comes ``first``, with all that shares its process trees, is in the order in which it
        is wanted, because time may be over soon. The rest is in a random one.
        """
        groups = self._groups(rungs)
        random.Random(number).shuffle(groups)
        ahead = (rung for rung in dict.fromkeys(first) if not self.measured.done(rung, number))
        wanted = {rung: place for place, rung in enumerate(ahead)}
        groups.sort(key=lambda group: min(wanted.get(rung, len(wanted)) for rung in group))
        found = [self._measure(group, number) for group in groups if not until()]
        return any(found)

    def _groups(self, rungs: Iterable[Rung]) -> list[list[Rung]]:
        """Rungs that share a process tree, in the order in which the first of each is wanted.

        Where a wrapper looks for unused parameters, ranks tell each other which in every backward:
        without an exchange they must do so from the start.
        """
        found: dict[object, list[Rung]] = {}
        for rung in dict.fromkeys(rungs):
            tied = self._finds_unused and rung.ablation.exchange == "none"
            shared = None if tied or rung in self._by_itself else self.target.together(rung)
            found.setdefault((shared is None, shared or rung), []).append(rung)
        return list(found.values())

    def _fitting(self, rungs: Iterable[Rung]) -> list[Rung]:
        """The first of these, in the order in which they are wanted, that there is time for."""
        left_s, fitting = self.clock.left_s, []
        for group in self._groups(r for r in rungs if not self.measured.done(r, 0)):
            known = all(self.target.known(rung, 0) for rung in group)
            left_s -= 0.0 if known else self.measured.seconds(group)
            if left_s >= 0:
                fitting += group
        return fitting

    def _need(self, ladder: Ladder, needed: Iterable[Rung], wanted: Sequence[Rung] = ()) -> None:
        """First runs without which nothing can be said, whatever time is left.

        What is wanted and shares their process trees is measured with them, unless steps are so
        long that there is no time for so many. One that fails is tried once more: a script that
        could be looked at may have failed by chance.
        """
        for rung in needed:
            while rung not in self.measured.runs:
                if rung in self.measured.reasons:
                    reason = self.measured.reasons.pop(rung)
                    if self.stop or rung in self._tried_again:
                        raise RunFailure(f"{rung}: {reason}; nothing can be explained")
                    self._tried_again.add(rung)
                (group, *_) = self._groups([rung, *wanted])
                asked = [one for one in group if self._open(one, 0)]
                if rung in asked:
                    asked = asked if self._fits(ladder, asked) else [rung]
                    self.events.started(asked, 0, self.clock.left_s)
                    self._keep_all(asked, 0, self._run(asked, 0))

    def _fits(self, ladder: Ladder, asked: Sequence[Rung]) -> bool:
        """Whether steps are short, or there is time for those of all these, which take turns."""
        short = self._step_s <= LONG_STEP_S
        return short or turns_s(ladder, asked, self._step_s) <= self.clock.left_s

    def _measure(self, group: Sequence[Rung], number: int) -> bool:
        """One run of rungs that share it, unless they cannot be, are there, or the time is over.

        It is given what is left, and once more what a run takes: what a script does between its
        passes may take any time. Returns whether any of them is measured.
        """
        asked = [rung for rung in group if self._open(rung, number)]
        seconds, new = self.measured.seconds(asked), not self.measured.has(asked[:1])
        if asked and not self.stop and seconds <= (OVER if new else 1) * self.clock.left_s:
            self.events.started(asked, number, self.clock.left_s)
            limit_s = self.clock.left_s + seconds
            self._keep_all(asked, number, self._run(asked, number, limit_s))
        return any(number in self.measured.runs.get(rung, {}) for rung in group)

    def _open(self, rung: Rung, number: int) -> bool:
        """Whether the rung is to be run: it can be, and was not; what was is kept."""
        if self.measured.done(rung, number):
            return False
        reason = self.target.refuses(rung)
        if reason is not None:
            self.measured.reasons[rung] = reason
            return False
        again = number == 0 and rung in self._tried_again
        found = None if again else self.target.known(rung, number)
        if found is not None:
            self._keep_all([rung], number, [found])
        return found is None

    def _run(
        self, rungs: Sequence[Rung], number: int, limit_s: float | None = None
    ) -> list[Measurement]:
        if len(rungs) > 1:
            return self.target.measure_together(rungs, number, limit_s)
        return [self.target.measure(rung, number, limit_s) for rung in rungs]

    def _keep_all(self, rungs: Sequence[Rung], number: int, found: list[Measurement]) -> None:
        """What had no turn before a run of several ended, well or not, is run by itself then.

        Where none had one, ``_failed`` says why the first had not.
        """
        self.events.finished(rungs, number, found, self.clock.left_s)
        for rung, measurement in zip(rungs, found, strict=True):
            ok = measurement.status == "ok"
            had_one = ok and bool(readings(measurement, coupled=rung.coupled))
            if len(rungs) > 1 and not had_one and (ok or not self.stop):
                self._by_itself.add(rung)
            else:
                self.measured.add(rung, number, measurement)
        if self._by_itself.issuperset(rungs) and found[0].status == "crashed":
            self._failed[rungs[0]] = reason_of(found[0])

    def _next(self, ladder: Ladder, rungs: list[Rung], number: int) -> list[Rung]:
        """All that there is in the second and third round; then what the widest row needs.

        With it, all that shares its process trees: what these differ by cancels between rungs
        that were in the same ones.
        """
        if number < 3:
            return rungs
        asked = asking.narrowing(ladder, self.measured)
        shared = {self.target.together(rung) for rung in asked} - {None}
        return [*asked, *(rung for rung in rungs if self.target.together(rung) in shared)]
