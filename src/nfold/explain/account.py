"""What the runs of a ladder say of its steps, and of what causes take of them. Pure functions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from nfold.explain import lines
from nfold.explain.causes import BY_ID, Cause
from nfold.explain.causes.base import left
from nfold.explain.causes.epoch_boundary import EpochBoundary
from nfold.explain.causes.undivided_work import SIGN, UndividedWork
from nfold.explain.fit import RESAMPLES, Fit, Number
from nfold.explain.ladder import Ladder
from nfold.explain.measured import Measured
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.finding import Finding, Speed
from nfold.stats import Interval

BETWEEN = EpochBoundary()


class Account:
    """One budget while it is made: the ladder, its runs, their fitted values."""

    def __init__(
        self,
        ladder: Ladder,
        measured: Measured,
        resamples: int = RESAMPLES,
        *,
        final: bool = True,
    ) -> None:
        self.ladder = ladder
        self.measured = measured
        self.fit: Fit = measured.fit(resamples, final=final)
        full = measured.runs[ladder.full()].values()
        self.kinds = {doubt.kind: doubt.text for m in full for doubt in m.warnings}

    @property
    def undivided(self) -> bool:
        """Whether every rank was fed the same samples, in the same order or another."""
        return SIGN in self.kinds or self.whole is not None

    @property
    def whole(self) -> str | None:
        """That ranks of a script go through the whole data set, each in its own order."""
        seen = self.ladder.seen
        return None if seen is None or SIGN in self.kinds else lines.whole_epochs(seen)

    def ideal_ms(self, view: View) -> float:
        """A step at N-fold speed."""
        return self._with_gap(self.ladder.one, view) / self.ladder.split

    def achieved_ms(self, view: View) -> float:
        """A step's worth of distinct samples on N devices."""
        step = self._with_gap(self.ladder.full(), view)
        return step * (self.ladder.devices if self.undivided else 1)

    def _with_gap(self, rung: Rung, view: View) -> float:
        return view.step(rung) + self._gap(rung, view)

    def _gap(self, rung: Rung, view: View) -> float:
        """What is in no usual step: a part of it, where that was measured at both ends."""
        return BETWEEN.of_step(self.ladder, view, rung)

    def speedup(self, view: View, gained_ms: float = 0.0) -> float:
        """Throughput of N devices over that of one, after so much is gained."""
        rest = left(self.achieved_ms(view), gained_ms)
        return self.ladder.devices * self.ideal_ms(view) / rest

    def alone_ms(self, view: View) -> float:
        """A step of one device alone with its share of the batch."""
        between = self._gap(self.ladder.one, view) / self.ladder.split
        return view.step(self.ladder.alone("real")) + between

    def speed(self, rung: Rung, times: int = 1) -> Speed:
        """Rate and step, time between epochs included; of ``times`` equal batches one counts."""
        counted = 1e3 * (rung.plan.batch or 1) / times
        rate = self.fit.interval(lambda view: counted / self._with_gap(rung, view))
        step = functools.partial(self._with_gap, rung)
        return Speed(samples_per_s=rate, step_ms=self.fit.interval(step))

    def rate(self, gained: Number) -> Interval:
        """Distinct samples a second on N devices, after so much is gained."""
        samples = 1e3 * (self.ladder.plan.batch or 1)
        return self.fit.interval(lambda v: samples / left(self.achieved_ms(v), gained(v)))

    def lost(self, cause: Cause) -> Number:
        """Its cost; ranks that were fed what they should repeat nothing."""
        if isinstance(cause, UndividedWork) and not self.undivided:
            return lambda view: 0.0
        if not self.undivided or cause.id != BETWEEN.id:
            return lambda view: cause.lost_ms(self.ladder, view)
        # Divided, the same samples are N times as many epochs, with as many ends.
        more, full = self.ladder.devices - 1, self.ladder.full()
        return lambda view: cause.lost_ms(self.ladder, view) + more * self._gap(full, view)

    def all_lost(self, cause: Cause) -> Number:
        """All that a step on N devices loses to it, what one loses in the same way too."""
        if isinstance(cause, UndividedWork):
            return self.lost(cause)
        return lambda view: cause.whole_ms(self.ladder, view)

    def own(self, cause: Cause) -> Number:
        """Of one device by itself. What would be slower without a cause loses nothing to it."""
        gains = cause.single_ms(self.ladder, self.fit.view) <= 0
        return lambda view: 0.0 if gains else cause.single_ms(self.ladder, view)

    def others_ms(self, rows: Sequence[Finding]) -> Interval:
        """What the rows without a name cost together, those of one device where it is the only."""
        costs = [self._cost(BY_ID[row.cause]) for row in rows if not row.named]
        return self.fit.interval(lambda view: sum(cost(view) for cost in costs))

    def _cost(self, cause: Cause) -> Number:
        return self.lost(cause) if self.ladder.devices > 1 else self.own(cause)

    def unexplained_ms(self, rows: Sequence[Finding]) -> Interval:
        """What is missing to N-fold less all rows, losses or gains."""
        costs = [self.lost(BY_ID[row.cause]) for row in rows]

        def rest(view: View) -> float:
            missing = self.achieved_ms(view) - self.ideal_ms(view)
            return missing - sum(cost(view) for cost in costs)

        return self.fit.interval(rest)
