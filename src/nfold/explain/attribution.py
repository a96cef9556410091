"""Attribute the time of a step to causes, from the fitted values of all trials. Pure functions."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from nfold.core.measurement import FetchStats
from nfold.core.stats import Interval
from nfold.explain.advice import headline
from nfold.explain.advice.caveats import (
    collect_caveats,
    epoch_boundary_lower_bound,
    faster_library_caveats,
    find_training_errors,
    short_step_caveats,
    unmeasured_causes,
)
from nfold.explain.cause_costs import Attribution
from nfold.explain.causes import CAUSES, Cause, applicable_causes
from nfold.explain.causes.cause import remaining_ms
from nfold.explain.causes.work_division import UndividedWorkCause
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import RESAMPLES, BootstrapFit, MetricView, Statistic
from nfold.explain.estimate.samples import Samples, ratio
from nfold.explain.result.budget import (
    MIN_STEP_FRACTION,
    BreakEvenBatch,
    Budget,
    Finding,
    Interaction,
    Speed,
    exceeds_noise,
)
from nfold.explain.step_account import StepAccountBuilder
from nfold.explain.trials import TrialResults


@dataclass(frozen=True)
class CausePair:
    """Two causes whose interventions can be combined in one trial.

    ``trials`` are the actual run, without the first cause, without the second, without both.
    """

    causes: tuple[str, str]
    trials: tuple[Trial, ...]

    def lost_ms(self, view: MetricView) -> Samples:
        """Return what both cost together beyond the sum of each."""
        real, first, second, neither = map(view.step, self.trials)
        return first + second - real - neither


def cause_pairs(design: ExperimentDesign, findings: Sequence[Finding]) -> Iterator[CausePair]:
    """Yield the pairs of the three largest findings with an intervention."""
    names = [row.cause for row in sorted(findings, key=lambda row: -row.lost_ms.value)]
    by_id = {c.id: c.removal for c in CAUSES if c.removal and not c.removal.refusal(design.plan)}
    largest = [name for name in dict.fromkeys(names) if name in by_id][:3]
    for pair in combinations(largest, 2):
        first, second = (by_id[name] for name in pair)
        removed = (first, second, first.merge(second))
        trials = (Trial(plan=design.plan, variant=variant) for variant in removed)
        yield CausePair(pair, (design.actual(), *trials))


class FindingBuilder(Attribution):
    """Builds findings: what a cause costs N devices or one device, and what would remove it."""

    @property
    def causes(self) -> list[Cause]:
        """The causes that apply to the design."""
        return [
            one for one in applicable_causes(self.design) if not one.skipped_reason(self.design)
        ]

    def multi_device_findings(self) -> list[Finding]:
        """Return what N devices lose, the largest first."""
        evidence = ((c, c.available_trials(self.design, self.view)) for c in self.causes)
        return _ordered(
            self._multi_device_finding(c, t) for c, t in evidence if self._is_determined(c, t)
        )

    def one_device_findings(self) -> list[Finding]:
        """Return what one device loses by itself, the largest first."""
        return _ordered(map(self._one_device_finding, self._one_device_causes()))

    def _one_device_causes(self) -> list[Cause]:
        return [
            c for c in self.causes if self._is_determined(c, c.one_device_evidence(self.design))
        ]

    def _is_determined(self, cause: Cause, trials: Sequence[Trial]) -> bool:
        measured = bool(trials) and self.results.has(trials)
        return measured and cause.is_determined(self.design, self.view)

    def _multi_device_finding(self, cause: Cause, trials: Sequence[Trial]) -> Finding:
        lost, achieved = self.loss(cause), self.achieved_ms
        cost, without = self.fit.interval(lost), self._rate_without_cause(cause)
        # Which samples ranks processed is a fact, however noisy their times are.
        undivided = isinstance(cause, UndividedWorkCause) and self.work_is_undivided
        parts = cause.components(self.design, self.view)
        found = Finding(
            cause=cause.id,
            lost_ms=cost,
            multi_device_total_ms=self._total_ms(cause),
            predicted_speedup=self._predicted_speedup(cause, lost),
            predicted_samples_per_s=without,
            bound_samples_per_s=without,
            fix=cause.fix(self.design, self.view),
            evidence=self.results.ids([*trials, *cause.refining_trials(self.design)]),
            significant=undivided or self.fit.is_significant(cost, lost, achieved),
            components=tuple(
                (name, self.fit.interval(self.component(cause, name))) for name in parts
            ),
        )
        return self._with_best_fix(cause, found, self.fit.value(achieved))

    def _one_device_finding(self, cause: Cause) -> Finding:
        lost = functools.partial(cause.one_device_ms, self.design)
        floor_ms = cause.floor_ms(self.design)

        def gained(view: MetricView) -> Samples:
            own = self.one_device_step_ms(view)
            return own / remaining_ms(own, np.maximum(0.0, lost(view)), floor_ms)

        def step(view: MetricView) -> Samples:
            return view.step(self.design.one_device("real"))

        estimate, step_ms = cause.direct_estimate(self.design), self.fit.value(step)
        cost, without = estimate or self.fit.interval(lost), self._rate_without_cause(cause)
        trials = (*cause.one_device_evidence(self.design), *cause.refining_trials(self.design))
        found = Finding(
            cause=cause.id,
            lost_ms=cost,
            multi_device_total_ms=self._total_ms(cause)
            if cause.multi_device_trials(self.design)
            else cost,
            predicted_speedup=self.fit.interval(gained),
            predicted_samples_per_s=without,
            bound_samples_per_s=without,
            fix=cause.one_device_fix(self.design, self.view),
            evidence=self.results.ids(trials),
            significant=exceeds_noise(estimate, step_ms)
            if estimate
            else self.fit.is_significant(cost, lost, step),
        )
        return self._with_best_fix(cause, found, step_ms, one_device=True)

    def _predicted_speedup(self, cause: Cause, lost: Statistic) -> Interval:
        most = self.speedup_after(lambda view: np.maximum(0.0, lost(view)))
        view = self.view
        if cause.gained_ms(self.design, view) == cause.lost_ms(self.design, view):
            return most
        least = self.speedup_after(functools.partial(cause.gained_ms, self.design))
        return Interval(least.value, least.low, max(most.high or 0.0, least.high or 0.0))

    def _total_ms(self, cause: Cause) -> Interval | None:
        known = cause.is_resolved(self.design, self.view)
        return self.fit.interval(self.total_loss(cause)) if known else None

    def _rate_without_cause(self, cause: Cause) -> Interval | None:
        if self.design.single_device_script or not cause.is_resolved(self.design, self.view):
            return None
        return self.samples_per_s(self.total_loss(cause))

    def _with_best_fix(
        self, cause: Cause, found: Finding, step_ms: float, *, one_device: bool = False
    ) -> Finding:
        """Add the best measured fix of a cost that may matter, if it gains more than the noise.

        A measured gain makes the finding significant, however uncertain its cost is.
        """
        worth = found.significant or found.lost_ms.value > MIN_STEP_FRACTION * step_ms
        fixes = self.measured_fixes(cause) if worth else {}
        saved = {f: functools.partial(self.saved_ms, t) for f, t in fixes.items()}
        flag = max(saved, key=lambda flag: saved[flag](self.view), default="")
        if not flag or not self.is_faster(fixes[flag]):
            return found
        evidence = (*found.evidence, *self.results.ids([fixes[flag]]))
        own_speedup = one_device and self.design.devices > 1
        return dataclasses.replace(
            found,
            fix=flag,
            predicted_speedup=found.predicted_speedup
            if own_speedup
            else self.speedup_after(saved[flag]),
            predicted_samples_per_s=self.samples_per_s(saved[flag]),
            evidence=tuple(dict.fromkeys(evidence)) if one_device else evidence,
            significant=True,
            fix_measured=True,
        )

    def interactions(self, findings: Sequence[Finding]) -> list[Interaction]:
        """Return what pairs of causes cost beyond their sum, if all four trials were measured."""
        return [
            Interaction(
                causes=pair.causes,
                lost_ms=self.fit.interval(pair.lost_ms),
                evidence=self.results.ids(pair.trials),
            )
            for pair in cause_pairs(self.design, findings)
            if self.results.has(pair.trials)
        ]

    def device_bound(self) -> Speed | None:
        """Return one device without everything that it loses by itself, None if nothing is known."""
        causes = self._one_device_causes()
        if not causes:
            return None
        costs = {cause: self.one_device_loss(cause) for cause in causes}
        step_ms = functools.partial(self.compute_ms, costs)
        rate = self.fit.interval(lambda view: 1e3 * self.design.batch_per_device / step_ms(view))
        return Speed(samples_per_s=rate, step_ms=self.fit.interval(step_ms))


def _ordered(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda row: (not row.significant, -row.lost_ms.value))


BATCH_FACTOR = 4


def break_even_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
    """Return the trials of the two lines: two batches on N devices and two on one."""
    batch = design.plan.batch or 1
    single = design.baseline
    if design.scaling == "weak":
        single = design.one_device("real", batch=BATCH_FACTOR * design.batch_per_device)
    larger = design.with_plan(batch=BATCH_FACTOR * batch)
    return (design.actual(), larger, design.one_device("real"), single)


def find_break_even_batch(
    design: ExperimentDesign, results: TrialResults, fit: BootstrapFit, speedup: Interval
) -> BreakEvenBatch | None:
    """Return the batch from which N devices are faster, None if they are faster already."""
    if speedup.high is None or speedup.high >= 1:
        return None
    trials = break_even_trials(design)
    if not results.has(trials):
        return BreakEvenBatch(devices_help=False, batch=None, evidence=())
    found = fit.interval(lambda view: break_even_batch(design, view))
    high = found.high if found.high is not None and math.isfinite(found.high) else None
    batch = Interval(found.value, found.low, high) if math.isfinite(found.value) else None
    return BreakEvenBatch(devices_help=False, batch=batch, evidence=results.ids(trials))


def break_even_batch(design: ExperimentDesign, view: MetricView) -> Samples:
    """Return the global batch at which N devices are as fast as one; infinite if there is none.

    With x samples per device, one device takes a + b·x per step, and N devices c + d·x for N·x
    samples. With strong scaling one device has N·x samples in a step, with weak scaling x in each
    of N steps.
    """
    n = design.devices
    many, more, share, other = (view.step(trial) for trial in break_even_trials(design))
    x = (design.plan.batch or 1) / n
    slope_n = (more - many) / ((BATCH_FACTOR - 1) * x)
    fixed_n = many - slope_n * x
    far = n * x if design.scaling == "strong" else BATCH_FACTOR * x
    slope = (other - share) / (far - x)
    fixed = share - slope * x
    if design.scaling == "weak":
        fixed *= n
    gained = n * slope - slope_n
    return n * ratio(np.maximum(0.0, fixed_n - fixed), gained, otherwise=math.inf)


def build_budget(
    target: str, design: ExperimentDesign, results: TrialResults, *, resamples: int = RESAMPLES
) -> Budget:
    """Return the result of an experiment; the baseline and the actual run must be measured."""
    builder = FindingBuilder(design, results, resamples)
    rows, single = builder.multi_device_findings(), builder.one_device_findings()
    speedup = builder.fit.interval(builder.speedup)
    account_builder = StepAccountBuilder(builder, [*rows, *single])
    account = account_builder.build()
    view, failure = builder.view, design.multi_process_failure
    return Budget(
        target=target,
        plan=design.plan,
        scaling=design.scaling,
        one_device=builder.speed(design.baseline),
        n_devices=builder.speed(
            design.actual(), design.devices if builder.work_is_undivided else 1
        ),
        ideal_ms=builder.fit.interval(builder.ideal_ms),
        speedup=speedup,
        rows=tuple(rows),
        one_device_rows=tuple(single),
        interactions=tuple(builder.interactions([*rows, *single])),
        device_bound=builder.device_bound(),
        not_significant_ms=builder.not_significant_ms(rows if design.devices > 1 else single),
        not_attributed_ms=builder.not_attributed_ms(rows),
        training_errors=find_training_errors(
            builder.caveat_texts, builder.duplicated_epochs, design.facts
        ),
        caveats=(
            *faster_library_caveats(design, results, builder.fit.value(builder.achieved_ms)),
            *short_step_caveats(design, float(view.step(design.baseline))),
            *collect_caveats(design, results, builder.fit),
        ),
        unmeasured=tuple(unmeasured_causes(design, results, view)),
        lower_bound=epoch_boundary_lower_bound(design, results, view),
        break_even_batch=None
        if design.single_device_script or design.devices == 1
        else find_break_even_batch(design, results, builder.fit, speedup),
        parallelism=headline.describe_parallelism(design.profile) if design.profile else "",
        headline=headline.write_headline(target, design.profile, design.devices, failure)
        if design.profile
        else "",
        account=account,
        changes=account_builder.changes(account),
        trials=account_builder.trials(),
        uses_one_device=design.single_device_script,
        fetch_lines=design.facts.fetch_lines,
        fetch_ms=_fetch_ms(design.facts.fetches),
        not_applicable=tuple(
            cause.id for cause in applicable_causes(design) if cause.skipped_reason(design)
        ),
    )


def _fetch_ms(fetches: FetchStats | None) -> float:
    return 1e3 * fetches.seconds / fetches.batches if fetches and fetches.batches else 0.0
