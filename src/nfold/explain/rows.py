"""The rows of a budget: what a cause costs N devices, and one by itself, and what would remove it.

Pure functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

from nfold.explain.account import BETWEEN, Account
from nfold.explain.causes import Cause, causes_of
from nfold.explain.causes.base import left
from nfold.explain.causes.undivided_work import UndividedWork
from nfold.explain.fit import Number
from nfold.explain.pairs import pairs
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.finding import FLOOR, Finding, Interaction, Speed, beyond
from nfold.stats import Interval


class Rows:
    """Those of an account."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.ladder, self.measured, self.fit = account.ladder, account.measured, account.fit

    def on_n(self) -> list[Finding]:
        """What N devices lose, the largest first."""
        asked = ((c, c.shown_by(self.ladder, self.fit.view)) for c in self._present())
        return _ordered(self._row(c, r) for c, r in asked if self._knows(c, r))

    def on_one(self) -> list[Finding]:
        """What one device loses by itself, the largest first."""
        return _ordered(self._own(c, r) for c, r in self._of_one())

    def _of_one(self) -> list[tuple[Cause, tuple[Rung, ...]]]:
        """The causes whose cost to one device alone is known, with the runs that tell it."""
        asked = ((cause, cause.single_evidence(self.ladder)) for cause in self._present())
        return [(c, r) for c, r in asked if self._knows(c, r)]

    def _present(self) -> Iterator[Cause]:
        return (cause for cause in causes_of(self.ladder) if not cause.absent(self.ladder))

    def _knows(self, cause: Cause, rungs: Sequence[Rung]) -> bool:
        known = bool(rungs) and self.measured.has(rungs)
        return known and cause.known(self.ladder, self.fit.view)

    def _row(self, cause: Cause, rungs: Sequence[Rung]) -> Finding:
        found = self._finding(cause, rungs, self.account.lost(cause))
        if isinstance(cause, UndividedWork) and self.account.undivided:
            # What ranks were fed is a fact, however much times scatter.
            found = dataclasses.replace(found, named=True)
        return self._fixed(cause, found)

    def _finding(self, cause: Cause, rungs: Sequence[Rung], lost: Number) -> Finding:
        cost, without = self.fit.interval(lost), self._rate_without(cause)
        parts = cause.parts(self.ladder, self.fit.view)
        return Finding(
            cause=cause.id,
            lost_ms=cost,
            whole_ms=self._whole(cause),
            predicted_speedup=self._predicted(cause, lost),
            predicted_samples_per_s=without,
            bound_samples_per_s=without,
            fix=cause.fix(self.ladder, self.fit.view),
            evidence=self.measured.ids([*rungs, *cause.telling(self.ladder)]),
            named=self.fit.sure(cost, lost, self.account.achieved_ms),
            parts=tuple((name, self._part(cause, name)) for name in parts),
        )

    def _predicted(self, cause: Cause, lost: Number) -> Interval:
        """From what is won at least to all that is lost, where the two differ."""
        most = self.fit.interval(lambda view: self.account.speedup(view, max(0.0, lost(view))))
        view = self.fit.view
        if cause.gained_ms(self.ladder, view) == cause.lost_ms(self.ladder, view):
            return most
        least = self.fit.interval(
            lambda view: self.account.speedup(view, cause.gained_ms(self.ladder, view))
        )
        return Interval(least.value, least.low, max(most.high or 0.0, least.high or 0.0))

    def _rate_with(self, best: tuple[str, Rung] | None) -> Interval | None:
        """Of N devices with a measured fix."""
        return self.account.rate(lambda view: self._gained(best[1], view)) if best else None

    def _with_fix(self, best: tuple[str, Rung] | None) -> Interval | None:
        """Of one device, which a measured fix makes so many times as fast."""
        if best is None or self.ladder.devices > 1:
            return None
        return self.fit.interval(
            lambda view: self.account.speedup(view, self._gained(best[1], view))
        )

    def _whole(self, cause: Cause) -> Interval | None:
        """All that a step on N devices loses to it."""
        known = cause.settled(self.ladder, self.fit.view)
        return self.fit.interval(self.account.all_lost(cause)) if known else None

    def _rate_without(self, cause: Cause) -> Interval | None:
        """Of N devices without the cause; None of a script that uses one of them."""
        if self.ladder.plain or not cause.settled(self.ladder, self.fit.view):
            return None
        return self.account.rate(self.account.all_lost(cause))

    def _part(self, cause: Cause, name: str) -> Interval:
        return self.fit.interval(lambda view: cause.parts(self.ladder, view)[name])

    def _fixed(self, cause: Cause, found: Finding) -> Finding:
        """The finding with the best measured fix, where one is better than the noise.

        What a change to it gains is a cost of it, however uncertain the cost itself is.
        """
        worth = found.lost_ms.value > FLOOR * self.account.achieved_ms(self.fit.view)
        best = self._best(cause) if found.named or worth else None
        if best is None:
            return found
        flag, rung = best
        return dataclasses.replace(
            found,
            fix=flag,
            predicted_speedup=self.fit.interval(
                lambda view: self.account.speedup(view, self._gained(rung, view))
            ),
            predicted_samples_per_s=self._rate_with(best),
            evidence=(*found.evidence, *self.measured.ids([rung])),
            named=True,
            proven=True,
        )

    def _best(self, cause: Cause) -> tuple[str, Rung] | None:
        """The measured fix with the fastest step on N devices, if it gains beyond the noise."""
        tried = {flag: rung for flag, rung in cause.fixes(self.ladder).items() if flag}
        known = {flag: rung for flag, rung in tried.items() if self.measured.has([rung])}
        if not known:
            return None
        flag = max(known, key=lambda flag: self._gained(known[flag], self.fit.view))
        gained = functools.partial(self._gained, known[flag])
        sure = self.fit.sure(self.fit.interval(gained), gained, self.account.achieved_ms)
        return (flag, known[flag]) if sure else None

    def _gained(self, rung: Rung, view: View) -> float:
        """By a fix, between epochs too where that is known of it."""
        gained = view.step(self.ladder.full()) - view.step(rung)
        return gained + BETWEEN.saved_ms(self.ladder, view, rung)

    def _own(self, cause: Cause, rungs: Sequence[Rung]) -> Finding:
        lost = functools.partial(cause.single_ms, self.ladder)

        def gained(view: View) -> float:
            alone = self.account.alone_ms(view)
            return alone / left(alone, max(0.0, lost(view)), cause.least_ms(self.ladder))

        def step(view: View) -> float:
            return view.step(self.ladder.alone("real"))

        told, step_ms = cause.told(self.ladder), step(self.fit.view)
        cost = told or self.fit.interval(lost)
        named = beyond(told, step_ms) if told else self.fit.sure(cost, lost, step)
        best = self._best(cause) if named or cost.value > FLOOR * step_ms else None
        without = self._rate_without(cause)
        return Finding(
            cause=cause.id,
            lost_ms=cost,
            whole_ms=self._whole(cause) if cause.on_n(self.ladder) else cost,
            predicted_speedup=self._with_fix(best) or self.fit.interval(gained),
            predicted_samples_per_s=self._rate_with(best) or without,
            bound_samples_per_s=without,
            proven=best is not None,
            fix=best[0] if best else cause.single_fix(self.ladder, self.fit.view),
            evidence=self.measured.ids([*rungs, *cause.telling(self.ladder), *(best or ())[1:]]),
            named=named or best is not None,
        )

    def interactions(self, findings: Sequence[Finding]) -> list[Interaction]:
        """What pairs of causes cost beyond their sum, where all four runs are there."""
        made = []
        for pair in pairs(self.ladder, findings):
            if self.measured.has(pair.rungs):
                cost = self.fit.interval(pair.lost_ms)
                ids = (pair.first.id, pair.second.id)
                evidence = self.measured.ids(pair.rungs)
                made.append(Interaction(causes=ids, lost_ms=cost, evidence=evidence))
        return made

    def device_bound(self) -> Speed | None:
        """One device alone without all that it loses by itself; None where nothing is known.

        Costs of the host may hide each other, and are then together more than the host's time: what
        the device was seen to be busy with is left, but for what it loses itself.
        """
        causes = [cause for cause, _ in self._of_one()]
        if not causes:
            return None
        costs = [(self.account.own(cause), cause.on_device) for cause in causes]
        busy_ms = max(cause.least_ms(self.ladder) for cause in causes)

        def step_ms(view: View) -> float:
            lost = [(cost(view), on_device) for cost, on_device in costs]
            least_ms = busy_ms - sum(ms for ms, on_device in lost if on_device)
            return left(self.account.alone_ms(view), sum(ms for ms, _ in lost), least_ms)

        rate = self.fit.interval(lambda view: 1e3 * self.ladder.share / step_ms(view))
        return Speed(samples_per_s=rate, step_ms=self.fit.interval(step_ms))


def _ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Named ones first, then by cost."""
    return sorted(findings, key=lambda row: (not row.named, -row.lost_ms.value))
