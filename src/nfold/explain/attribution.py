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
from nfold.explain.advice.exchange_repairs import describe_exchange
from nfold.explain.cause_costs import Attribution, remaining_ms
from nfold.explain.causes import CAUSES, CAUSES_BY_ID, Cause, applicable_causes
from nfold.explain.causes.cause import skipped_reason
from nfold.explain.causes.cost_model import CostModel, component, one_device_trials_and_step
from nfold.explain.causes.epoch_boundary import EPOCH_BOUNDARY
from nfold.explain.causes.work_division import UNDIVIDED_WORK
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
from nfold.explain.several_devices import estimate_several_devices
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


class FindingBuilder:
    """Builds findings: what a cause costs N devices or one device, and what would remove it."""

    def __init__(self, attribution: Attribution) -> None:
        self.attribution, self.fit = attribution, attribution.fit
        self.design, self.results = attribution.design, attribution.results
        self.view = attribution.view

    def multi_device_findings(self) -> list[Finding]:
        """Return what N devices lose, the largest first."""
        evidence = {name: c.evidence(self.view) for name, c in self.attribution.costs.items()}
        return _ordered(
            self._multi_device_finding(CAUSES_BY_ID[name], trials)
            for name, trials in evidence.items()
            if trials and self.attribution.costs[name].is_determined(self.view)
        )

    def one_device_findings(self) -> list[Finding]:
        """Return what one device loses by itself, the largest first."""
        evidence = self._one_device_evidence()
        return _ordered(
            self._one_device_finding(CAUSES_BY_ID[name], trials)
            for name, trials in evidence.items()
        )

    def _one_device_evidence(self) -> dict[str, tuple[Trial, ...]]:
        costs, view = self.attribution.costs, self.view
        every = {name: one_device_trials_and_step(model) for name, model in costs.items()}
        measured = {name: own for name, own in every.items() if own and self.results.has(own)}
        return {name: own for name, own in measured.items() if costs[name].is_determined(view)}

    def _multi_device_finding(self, cause: Cause, trials: Sequence[Trial]) -> Finding:
        attribution, costs = self.attribution, self.attribution.costs[cause.id]
        lost, achieved = self._loss(cause.id), attribution.achieved_ms
        cost, (total, without) = self.fit.interval(lost), self._total_and_rate_without(cause)
        # Which samples ranks processed is a fact, however noisy their times are.
        undivided = cause is UNDIVIDED_WORK and attribution.work_is_undivided
        parts = {name: component(costs, name) for name in costs.components(self.view)}
        found = Finding(
            cause=cause.id,
            lost_ms=cost,
            multi_device_total_ms=total,
            predicted_speedup=self._predicted_speedup(costs, lost),
            predicted_samples_per_s=without,
            bound_samples_per_s=without,
            fix=cause.fix(self.design, self.view),
            evidence=self.results.ids([*trials, *costs.refining_trials]),
            significant=undivided or self.fit.is_significant(cost, lost, achieved),
            components=tuple((name, self.fit.interval(part)) for name, part in parts.items()),
        )
        return self._with_best_fix(found, self.fit.value(achieved))

    def _one_device_finding(self, cause: Cause, trials: Sequence[Trial]) -> Finding:
        costs = self.attribution.costs[cause.id]
        lost, floor_ms = costs.one_device_ms, costs.floor_ms()

        def gained(view: MetricView) -> Samples:
            own = self.attribution.one_device_step_ms(view)
            return own / remaining_ms(own, np.maximum(0.0, lost(view)), floor_ms)

        def step(view: MetricView) -> Samples:
            return view.step(self.design.one_device("real"))

        estimate, step_ms = costs.direct_estimate(), self.fit.value(step)
        cost = estimate or self.fit.interval(lost)
        total, without = self._total_and_rate_without(cause)
        found = Finding(
            cause=cause.id,
            lost_ms=cost,
            multi_device_total_ms=total if costs.trials else cost,
            predicted_speedup=self.fit.interval(gained),
            predicted_samples_per_s=without,
            bound_samples_per_s=without,
            fix=cause.one_device_fix(self.design, self.view),
            evidence=self.results.ids((*trials, *costs.refining_trials)),
            significant=exceeds_noise(estimate, step_ms)
            if estimate
            else self.fit.is_significant(cost, lost, step),
        )
        return self._with_best_fix(found, step_ms, one_device=True)

    def _loss(self, cause: str) -> Statistic:
        """Return what N devices lose to a cause beyond what one loses."""
        lost_ms = self.attribution.costs[cause].lost_ms
        if cause == UNDIVIDED_WORK.id and not self.attribution.work_is_undivided:
            return lambda view: 0.0
        if not self.attribution.work_is_undivided or cause != EPOCH_BOUNDARY.id:
            return lost_ms
        # The same samples are N times as many epochs, with N times as many boundaries.
        epochs, more = EPOCH_BOUNDARY.costs(self.design), self.design.devices - 1
        actual = self.design.actual()
        return lambda view: lost_ms(view) + more * epochs.ms_per_step(view, actual)

    def _total_and_rate_without(self, cause: Cause) -> tuple[Interval | None, Interval | None]:
        """Return all that a step on N devices loses to a cause, and samples/s without; if known."""
        costs = self.attribution.costs[cause.id]
        if costs.trials and not costs.evidence(self.view):
            return None, None
        total = self._loss(cause.id) if cause is UNDIVIDED_WORK else costs.total_ms
        one = self.design.single_device_script
        return self.fit.interval(total), None if one else self.attribution.samples_per_s(total)

    def _one_device_loss(self, cause: str) -> Statistic:
        """Return what one device loses to a cause by itself, at least 0."""
        lost_ms = self.attribution.costs[cause].one_device_ms
        return (lambda view: 0.0) if lost_ms(self.view) <= 0 else lost_ms

    def _speedup_after(self, gained_ms: Statistic) -> Interval:
        return self.fit.interval(lambda view: self.attribution.speedup(view, gained_ms(view)))

    def _predicted_speedup(self, costs: CostModel, lost: Statistic) -> Interval:
        most = self._speedup_after(lambda view: np.maximum(0.0, lost(view)))
        if costs.gained_ms(self.view) == costs.lost_ms(self.view):
            return most
        least = self._speedup_after(costs.gained_ms)
        return Interval(least.value, least.low, max(most.high or 0.0, least.high or 0.0))

    def _with_best_fix(
        self, found: Finding, step_ms: float, *, one_device: bool = False
    ) -> Finding:
        """Add the best measured fix of a cost that may matter, if it gains more than the noise.

        A measured gain makes the finding significant, however uncertain its cost is.
        """
        attribution = self.attribution
        worth = found.significant or found.lost_ms.value > MIN_STEP_FRACTION * step_ms
        fixes = attribution.measured_fixes(found.cause) if worth else {}
        saved = {f: functools.partial(attribution.saved_ms, t) for f, t in fixes.items()}
        flag = max(saved, key=lambda flag: saved[flag](self.view), default="")
        if not flag or not attribution.is_faster(fixes[flag]):
            return found
        evidence = (*found.evidence, *self.results.ids([fixes[flag]]))
        own_speedup = one_device and self.design.devices > 1
        return dataclasses.replace(
            found,
            fix=flag,
            predicted_speedup=found.predicted_speedup
            if own_speedup
            else self._speedup_after(saved[flag]),
            predicted_samples_per_s=attribution.samples_per_s(saved[flag]),
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
        costs = {name: self._one_device_loss(name) for name in self._one_device_evidence()}
        if not costs:
            return None
        step_ms = functools.partial(self.attribution.compute_ms, costs)
        rate = self.fit.interval(lambda view: 1e3 * self.design.batch_per_device / step_ms(view))
        return Speed(samples_per_s=rate, step_ms=self.fit.interval(step_ms))

    def not_significant_ms(self, rows: Sequence[Finding]) -> Interval:
        """Return the sum of all findings within the noise."""
        loss = self._loss if self.design.devices > 1 else self._one_device_loss
        costs = [loss(row.cause) for row in rows if not row.significant]
        return self.fit.interval(lambda view: sum(cost(view) for cost in costs))

    def not_attributed_ms(self, rows: Sequence[Finding]) -> Interval:
        """Return what is missing to N-fold speed less all findings."""
        costs = [self._loss(row.cause) for row in rows]

        def residual(view: MetricView) -> Samples:
            missing = self.attribution.achieved_ms(view) - self.attribution.ideal_ms(view)
            return missing - sum(cost(view) for cost in costs)

        return self.fit.interval(residual)


def _ordered(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda row: (not row.significant, -row.lost_ms.value))


BATCH_FACTOR = 4


def break_even_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
    """Return the trials of the two lines: two batches on N devices and two on one."""
    batch = design.plan.batch or 1
    single = design.baseline
    if design.scaling == "weak":
        single = single.edit(batch=BATCH_FACTOR * design.batch_per_device)
    full = design.actual()
    return (full, full.edit(batch=BATCH_FACTOR * batch), design.one_device("real"), single)


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
    attribution = Attribution(design, results, resamples)
    builder, fit, view = FindingBuilder(attribution), attribution.fit, attribution.view
    rows, single = builder.multi_device_findings(), builder.one_device_findings()
    speedup = fit.interval(attribution.speedup)
    account_builder = StepAccountBuilder(attribution, [*rows, *single])
    account = account_builder.build()
    failure = design.multi_process_failure
    return Budget(
        target=target,
        plan=design.plan,
        scaling=design.scaling,
        one_device=attribution.speed(design.baseline),
        n_devices=attribution.speed(
            design.actual(), design.devices if attribution.work_is_undivided else 1
        ),
        ideal_ms=fit.interval(attribution.ideal_ms),
        speedup=speedup,
        rows=tuple(rows),
        one_device_rows=tuple(single),
        interactions=tuple(builder.interactions([*rows, *single])),
        device_bound=builder.device_bound(),
        not_significant_ms=builder.not_significant_ms(rows if design.devices > 1 else single),
        not_attributed_ms=builder.not_attributed_ms(rows),
        training_errors=find_training_errors(
            attribution.caveat_texts, attribution.duplicated_epochs, design.facts
        ),
        caveats=(
            *faster_library_caveats(design, results, fit.value(attribution.achieved_ms)),
            *short_step_caveats(design, float(view.step(design.baseline))),
            *collect_caveats(design, results, fit),
        ),
        unmeasured=tuple(unmeasured_causes(design, results, view)),
        lower_bound=epoch_boundary_lower_bound(design, results, view),
        break_even_batch=None
        if design.single_device_script or design.devices == 1
        else find_break_even_batch(design, results, fit, speedup),
        parallelism=headline.describe_parallelism(design.profile) if design.profile else "",
        multi_process_failure=failure,
        headline=headline.write_headline(design.profile, design.devices, failure)
        if design.profile
        else "",
        account=account,
        changes=account_builder.changes(account),
        trials=account_builder.trials(),
        uses_one_device=design.single_device_script,
        several_devices=estimate_several_devices(design, results, fit),
        fetch_lines=design.facts.fetch_lines,
        exchange=describe_exchange(design.facts),
        fetch_ms=_fetch_ms(design.facts.fetches),
        not_applicable=tuple(
            cause.id for cause in applicable_causes(design) if skipped_reason(cause, design)
        ),
    )


def _fetch_ms(fetches: FetchStats | None) -> float:
    return 1e3 * fetches.seconds / fetches.batches if fetches and fetches.batches else 0.0
