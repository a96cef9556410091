"""The experiment: which rungs are run, in which order, how often, until the time is over.

Rounds over all rungs, each in a random order of its own, so that drift meets all alike. What
the first round shows asks for further rungs (fixes, causes taken away together, other batches);
later rounds repeat the rungs of the row whose interval is widest.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from nfold.errors import RunFailure
from nfold.explain import batch
from nfold.explain.budget import Account, pairs
from nfold.explain.causes import CAUSES
from nfold.explain.causes.epoch_boundary import whole_epochs
from nfold.explain.causes.input import real_ladder
from nfold.explain.ladder import Ladder, Rung
from nfold.explain.measured import Measured
from nfold.explain.readings import readings
from nfold.explain.target import Target
from nfold.finding import Finding
from nfold.measurement import Measurement
from nfold.plan import Plan
from nfold.run.options import Stop

PILOT_STEPS = 30
LEAST_STEPS, MOST_STEPS = 20, 2000
TIMED_S = 2.0
"""What a run is to time: about as long as it takes to start one."""
MOST_ROUNDS = 6
NARROW = 0.01
"""Of a step: once every interval is as narrow, nothing is repeated."""
PROBING = 100
"""Resamples while the experiment goes on: its choices need no more."""
EPOCH_PART = 0.1
"""The part of the time budget that whole epochs may take."""


class Events:
    """What an experiment tells while it goes on. This base listens to nothing."""

    def started(self, rung: Rung, number: int, left_s: float) -> None:
        """A run begins; ``number`` is its round."""

    def finished(self, rung: Rung, number: int, measurement: Measurement, left_s: float) -> None:
        """A run has ended, well or not, or was measured before."""


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

    def run(self, ladder: Ladder) -> Ladder:
        """Measure; the ladder with the length of its runs. Raises RunFailure without a result."""
        ladder = self._long_enough(ladder)
        for rung in (ladder.full(), ladder.one):
            self._need(rung)
        first = [*_wanted(ladder), *self._epochs(ladder)]
        self._round(self._fitting(first), 0)
        self._round(first, 0)
        for number in range(1, MOST_ROUNDS):
            follow_ups = self._follow_ups(ladder)
            rungs = self._next(ladder, [*first, *follow_ups], number)
            new = [rung for rung in follow_ups if not self.measured.rounds(rung)]
            if self.stop or not (rungs or new) or not self._round([*new, *rungs], number):
                break
        return ladder

    def attempt(self, rung: Rung, *, anew: bool = False) -> Measurement:
        """One run that is no part of the ladder, whatever time is left and however it ends."""
        found = None if anew else self.target.known(rung, 0)
        if found is None:
            self.events.started(rung, 0, self.clock.left_s)
            found = self.target.measure(rung, 0)
        self.events.finished(rung, 0, found, self.clock.left_s)
        return found

    def _long_enough(self, ladder: Ladder) -> Ladder:
        """Steps for all rungs, by a short run, in round numbers.

        The same for every time budget, so that with a larger one the earlier runs are found.
        """
        plan = ladder.plan
        step_s = (ladder.step_ms or self._pilot_ms(plan)) / 1e3
        steps = min(MOST_STEPS, max(LEAST_STEPS, rounded(TIMED_S / max(1e-6, step_s))))
        timed = plan.edit(steps=steps, epochs=None)
        return dataclasses.replace(ladder, plan=timed, made={})

    def _pilot_ms(self, plan: Plan) -> float:
        pilot = Rung(plan=plan.edit(steps=PILOT_STEPS, epochs=None))
        found = readings(self._need(pilot), coupled=True)["step"]
        del self.measured.runs[pilot]
        return found

    def _round(self, rungs: Iterable[Rung], number: int) -> bool:
        """Every rung once, in a random order; whether any was run or known."""
        turns = list(dict.fromkeys(rungs))
        random.Random(number).shuffle(turns)
        found = [self._measure(rung, number) for rung in turns]
        return any(measurement is not None for measurement in found)

    def _fitting(self, rungs: Iterable[Rung]) -> list[Rung]:
        """The first of these, in the order in which they are wanted, that there is time for."""
        left_s, fitting = self.clock.left_s, []
        for rung in dict.fromkeys(rungs):
            known = rung in self.measured.runs or self.target.known(rung, 0) is not None
            left_s -= 0.0 if known else self.measured.seconds(rung) or 0.0
            if left_s >= 0:
                fitting.append(rung)
        return fitting

    def _need(self, rung: Rung) -> Measurement:
        """The first run of a rung without which nothing can be said, whatever time is left."""
        found = self.target.known(rung, 0)
        if found is None:
            self.events.started(rung, 0, self.clock.left_s)
            found = self.target.measure(rung, 0)
        self._keep(rung, 0, found)
        if found.status != "ok":
            raise RunFailure(f"{rung}: {self.measured.reasons[rung]}; nothing can be explained")
        return found

    def _measure(self, rung: Rung, number: int) -> Measurement | None:
        """One run, unless it cannot be, is there, or the time is over."""
        if number in self.measured.runs.get(rung, {}):
            return self.measured.runs[rung][number]
        if rung in self.measured.reasons:
            return None
        reason = self.target.refuses(rung)
        if reason is not None:
            self.measured.reasons[rung] = reason
            return None
        found = self.target.known(rung, number)
        if found is None:
            if self.stop or (self.measured.seconds(rung) or 0.0) > self.clock.left_s:
                return None
            self.events.started(rung, number, self.clock.left_s)
            found = self.target.measure(rung, number)
        self._keep(rung, number, found)
        return found

    def _keep(self, rung: Rung, number: int, found: Measurement) -> None:
        self.measured.add(rung, number, found)
        self.events.finished(rung, number, found, self.clock.left_s)

    def _epochs(self, ladder: Ladder) -> list[Rung]:
        """Whole epochs, where they are known to be short."""
        rungs = [whole_epochs(ladder.full()), whole_epochs(ladder.one)]
        view = self.measured.fit(PROBING).view
        taken_s = 0.0
        for rung, timed in zip(rungs, (ladder.full(), ladder.one), strict=True):
            steps = ladder.epoch_steps(rung.plan) or self.target.epoch_steps(rung.plan)
            if steps is None:
                return self._leave_out(rungs, "how long an epoch is is not known")
            if (rung.plan.warmup_steps or 0) > ((rung.plan.epochs or 1) - 1) * steps:
                return self._leave_out(rungs, f"epochs of {steps} steps are over in the warm-up")
            taken_s += (rung.plan.epochs or 1) * steps * view.step(timed) / 1e3
        if taken_s > EPOCH_PART * self.clock.budget_s:
            text = f"whole epochs take {taken_s:.0f} s; next: --budget {10 * taken_s:.0f}s"
            return self._leave_out(rungs, text)
        return rungs

    def _leave_out(self, rungs: Iterable[Rung], reason: str) -> list[Rung]:
        for rung in rungs:
            self.measured.reasons[rung] = reason
        return []

    def _follow_ups(self, ladder: Ladder) -> list[Rung]:
        """What the rows so far ask for."""
        account = Account(ladder, self.measured, PROBING)
        rows, single = account.rows(), account.single()
        named = [row for row in (*rows, *single) if row.named]
        found = [rung for pair in pairs(ladder, named) for rung in pair.rungs]
        for cause in CAUSES:
            if any(row.cause == cause.id for row in named):
                found += cause.fixes(ladder).values()
        if any(row.cause == "input" for row in named):
            found += real_ladder(ladder)
        if account.speedup(account.fit.view) < 1 and not ladder.plain:
            found += batch.rungs(ladder)
        return list(dict.fromkeys(found))

    def _next(self, ladder: Ladder, rungs: list[Rung], number: int) -> list[Rung]:
        """All that there is in the second and third round; then what the widest row needs."""
        if number < 3:
            return rungs
        account = Account(ladder, self.measured, PROBING)
        widest = max(account.rows(), key=_width, default=None)
        step_ms = account.achieved_ms(account.fit.view)
        if widest is None or _width(widest) < NARROW * step_ms:
            return []
        own = next(cause for cause in CAUSES if cause.id == widest.cause)
        return [ladder.full(), ladder.one, *own.rungs(ladder)]


def _wanted(ladder: Ladder) -> Iterator[Rung]:
    """The rungs of every cause that the plan can have; whole epochs are asked for apart."""
    for cause in CAUSES:
        if cause.silent(ladder) is None:
            for rung in (*cause.rungs(ladder), *cause.single_rungs(ladder)):
                if rung.plan.steps is not None:
                    yield rung


def _width(row: Finding) -> float:
    assert row.lost_ms.low is not None
    assert row.lost_ms.high is not None
    return row.lost_ms.high - row.lost_ms.low


def rounded(steps: float) -> int:
    """The next of 1, 2, 5, 10, 20, ... from ``steps`` on."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if factor * size >= steps:
                return factor * size
        size *= 10
