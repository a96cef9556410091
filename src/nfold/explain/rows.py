"""The rows of a budget: what a cause costs N devices, and one by itself, and what would remove it.

Pure functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

from nfold.explain.account import EPOCH_BOUNDARY, Attribution
from nfold.explain.causes import Cause, applicable_causes
from nfold.explain.causes.base import remaining_ms
from nfold.explain.causes.undivided_work import UndividedWorkCause
from nfold.explain.fit import Statistic
from nfold.explain.pairs import cause_pairs
from nfold.explain.rung import Trial
from nfold.explain.view import MetricView
from nfold.finding import MIN_STEP_FRACTION, Finding, Interaction, Speed, exceeds_noise
from nfold.stats import Interval


class FindingBuilder:
    """Those of an account."""

    def __init__(self, attribution: Attribution) -> None:
        self.attribution = attribution
        self.design, self.results, self.fit = (
            attribution.design,
            attribution.results,
            attribution.fit,
        )

    def multi_device_findings(self) -> list[Finding]:
        """What N devices lose, the largest first."""
        asked = (
            (c, c.available_trials(self.design, self.fit.view)) for c in self._applicable_causes()
        )
        return _ordered(
            self._multi_device_finding(c, r) for c, r in asked if self._is_determined(c, r)
        )

    def one_device_findings(self) -> list[Finding]:
        """What one device loses by itself, the largest first."""
        return _ordered(self._one_device_finding(c, r) for c, r in self._one_device_causes())

    def _one_device_causes(self) -> list[tuple[Cause, tuple[Trial, ...]]]:
        """The causes whose cost to one device alone is known, with the runs that tell it."""
        asked = (
            (cause, cause.one_device_evidence(self.design)) for cause in self._applicable_causes()
        )
        return [(c, r) for c, r in asked if self._is_determined(c, r)]

    def _applicable_causes(self) -> Iterator[Cause]:
        return (
            cause
            for cause in applicable_causes(self.design)
            if not cause.skipped_reason(self.design)
        )

    def _is_determined(self, cause: Cause, trials: Sequence[Trial]) -> bool:
        known = bool(trials) and self.results.has(trials)
        return known and cause.is_determined(self.design, self.fit.view)

    def _multi_device_finding(self, cause: Cause, trials: Sequence[Trial]) -> Finding:
        found = self._finding(cause, trials, self.attribution.loss(cause))
        if isinstance(cause, UndividedWorkCause) and self.attribution.work_is_undivided:
            # What ranks were fed is a fact, however much times scatter.
            found = dataclasses.replace(found, significant=True)
        return self._with_best_fix(cause, found)

    def _finding(self, cause: Cause, trials: Sequence[Trial], lost: Statistic) -> Finding:
        cost, without = self.fit.interval(lost), self._rate_without_cause(cause)
        parts = cause.components(self.design, self.fit.view)
        return Finding(
            cause=cause.id,
            lost_ms=cost,
            multi_device_total_ms=self._total_ms(cause),
            predicted_speedup=self._predicted_speedup(cause, lost),
            predicted_samples_per_s=without,
            bound_samples_per_s=without,
            fix=cause.fix(self.design, self.fit.view),
            evidence=self.results.ids([*trials, *cause.refining_trials(self.design)]),
            significant=self.fit.is_significant(cost, lost, self.attribution.achieved_ms),
            components=tuple((name, self._component(cause, name)) for name in parts),
        )

    def _predicted_speedup(self, cause: Cause, lost: Statistic) -> Interval:
        """From what is won at least to all that is lost, where the two differ."""
        most = self.fit.interval(lambda view: self.attribution.speedup(view, max(0.0, lost(view))))
        view = self.fit.view
        if cause.gained_ms(self.design, view) == cause.lost_ms(self.design, view):
            return most
        least = self.fit.interval(
            lambda view: self.attribution.speedup(view, cause.gained_ms(self.design, view))
        )
        return Interval(least.value, least.low, max(most.high or 0.0, least.high or 0.0))

    def _rate_with_fix(self, best: tuple[str, Trial] | None) -> Interval | None:
        """Of N devices with a measured fix."""
        return (
            self.attribution.samples_per_s(lambda view: self._gained_ms(best[1], view))
            if best
            else None
        )

    def _speedup_with_fix(self, best: tuple[str, Trial] | None) -> Interval | None:
        """Of one device, which a measured fix makes so many times as fast."""
        if best is None or self.design.devices > 1:
            return None
        return self.fit.interval(
            lambda view: self.attribution.speedup(view, self._gained_ms(best[1], view))
        )

    def _total_ms(self, cause: Cause) -> Interval | None:
        """All that a step on N devices loses to it."""
        known = cause.is_resolved(self.design, self.fit.view)
        return self.fit.interval(self.attribution.total_loss(cause)) if known else None

    def _rate_without_cause(self, cause: Cause) -> Interval | None:
        """Of N devices without the cause; None of a script that uses one of them."""
        if self.design.single_device_script or not cause.is_resolved(self.design, self.fit.view):
            return None
        return self.attribution.samples_per_s(self.attribution.total_loss(cause))

    def _component(self, cause: Cause, name: str) -> Interval:
        return self.fit.interval(lambda view: cause.components(self.design, view)[name])

    def _with_best_fix(self, cause: Cause, found: Finding) -> Finding:
        """The finding with the best measured fix, where one is better than the noise.

        What a change to it gains is a cost of it, however uncertain the cost itself is.
        """
        worth = found.lost_ms.value > MIN_STEP_FRACTION * self.attribution.achieved_ms(
            self.fit.view
        )
        best = self._best_fix(cause) if found.significant or worth else None
        if best is None:
            return found
        flag, rung = best
        return dataclasses.replace(
            found,
            fix=flag,
            predicted_speedup=self.fit.interval(
                lambda view: self.attribution.speedup(view, self._gained_ms(rung, view))
            ),
            predicted_samples_per_s=self._rate_with_fix(best),
            evidence=(*found.evidence, *self.results.ids([rung])),
            significant=True,
            fix_measured=True,
        )

    def _best_fix(self, cause: Cause) -> tuple[str, Trial] | None:
        """The measured fix with the fastest step on N devices, if it gains beyond the noise."""
        tried = {flag: rung for flag, rung in cause.fixes(self.design).items() if flag}
        known = {flag: rung for flag, rung in tried.items() if self.results.has([rung])}
        if not known:
            return None
        flag = max(known, key=lambda flag: self._gained_ms(known[flag], self.fit.view))
        gained = functools.partial(self._gained_ms, known[flag])
        sure = self.fit.is_significant(
            self.fit.interval(gained), gained, self.attribution.achieved_ms
        )
        return (flag, known[flag]) if sure else None

    def _gained_ms(self, trial: Trial, view: MetricView) -> float:
        """By a fix, between epochs too where that is known of it."""
        gained = view.step(self.design.actual()) - view.step(trial)
        return gained + EPOCH_BOUNDARY.saved_ms(self.design, view, trial)

    def _one_device_finding(self, cause: Cause, trials: Sequence[Trial]) -> Finding:
        lost = functools.partial(cause.one_device_ms, self.design)

        def gained(view: MetricView) -> float:
            alone = self.attribution.one_device_step_ms(view)
            return alone / remaining_ms(alone, max(0.0, lost(view)), cause.floor_ms(self.design))

        def step(view: MetricView) -> float:
            return view.step(self.design.one_device("real"))

        told, step_ms = cause.direct_estimate(self.design), step(self.fit.view)
        cost = told or self.fit.interval(lost)
        named = exceeds_noise(told, step_ms) if told else self.fit.is_significant(cost, lost, step)
        best = self._best_fix(cause) if named or cost.value > MIN_STEP_FRACTION * step_ms else None
        without = self._rate_without_cause(cause)
        return Finding(
            cause=cause.id,
            lost_ms=cost,
            multi_device_total_ms=self._total_ms(cause)
            if cause.multi_device_trials(self.design)
            else cost,
            predicted_speedup=self._speedup_with_fix(best) or self.fit.interval(gained),
            predicted_samples_per_s=self._rate_with_fix(best) or without,
            bound_samples_per_s=without,
            fix_measured=best is not None,
            fix=best[0] if best else cause.one_device_fix(self.design, self.fit.view),
            evidence=self.results.ids(
                [*trials, *cause.refining_trials(self.design), *(best or ())[1:]]
            ),
            significant=named or best is not None,
        )

    def interactions(self, findings: Sequence[Finding]) -> list[Interaction]:
        """What pairs of causes cost beyond their sum, where all four runs are there."""
        made = []
        for pair in cause_pairs(self.design, findings):
            if self.results.has(pair.trials):
                cost = self.fit.interval(pair.lost_ms)
                ids = (pair.first.id, pair.second.id)
                evidence = self.results.ids(pair.trials)
                made.append(Interaction(causes=ids, lost_ms=cost, evidence=evidence))
        return made

    def device_bound(self) -> Speed | None:
        """One device alone without all that it loses by itself; None where nothing is known.

        Costs of the host may hide each other, and are then together more than the host's time: what
        the device was seen to be busy with is left, but for what it loses itself.
        """
        causes = [cause for cause, _ in self._one_device_causes()]
        if not causes:
            return None
        costs = [
            (self.attribution.one_device_loss(cause), cause.occupies_device) for cause in causes
        ]
        busy_ms = max(cause.floor_ms(self.design) for cause in causes)

        def step_ms(view: MetricView) -> float:
            lost = [(cost(view), on_device) for cost, on_device in costs]
            least_ms = busy_ms - sum(ms for ms, on_device in lost if on_device)
            return remaining_ms(
                self.attribution.one_device_step_ms(view), sum(ms for ms, _ in lost), least_ms
            )

        rate = self.fit.interval(lambda view: 1e3 * self.design.batch_per_device / step_ms(view))
        return Speed(samples_per_s=rate, step_ms=self.fit.interval(step_ms))


def _ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Named ones first, then by cost."""
    return sorted(findings, key=lambda row: (not row.significant, -row.lost_ms.value))
