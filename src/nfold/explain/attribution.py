"""Attribute the time of a step to causes, from the fitted values of all trials. Pure functions."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

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
    """Two causes whose interventions can be combined in one trial."""

    first: Cause
    second: Cause
    design: ExperimentDesign

    @property
    def trials(self) -> tuple[Trial, Trial, Trial, Trial]:
        """The actual run, without the first cause, without the second, without both."""
        first, second = self.first.removal, self.second.removal
        variants = (first, second, first.merge(second))
        return (
            self.design.actual(),
            *(Trial(plan=self.design.plan, variant=variant) for variant in variants),
        )

    def lost_ms(self, view: MetricView) -> float:
        """Return what both cost together beyond the sum of each."""
        real, first, second, neither = map(view.step, self.trials)
        return first + second - real - neither


def cause_pairs(design: ExperimentDesign, findings: Sequence[Finding]) -> Iterator[CausePair]:
    """Yield the pairs of the three largest findings with an intervention."""
    names = [row.cause for row in sorted(findings, key=lambda row: -row.lost_ms.value)]
    removable = [c for c in CAUSES if c.removal and c.removal.refusal(design.plan) is None]
    by_name = {cause.id: cause for cause in removable}
    largest = [by_name[name] for name in dict.fromkeys(names) if name in by_name][:3]
    for first, second in combinations(largest, 2):
        yield CausePair(first, second, design)


class FindingBuilder:
    """Builds findings: what a cause costs N devices or one device, and what would remove it."""

    def __init__(self, attribution: Attribution) -> None:
        self.attribution = attribution
        self.design, self.results, self.fit = (
            attribution.design,
            attribution.results,
            attribution.fit,
        )

    def multi_device_findings(self) -> list[Finding]:
        """Return what N devices lose, the largest first."""
        evidence = (
            (c, c.available_trials(self.design, self.fit.view)) for c in self._applicable_causes()
        )
        return _ordered(
            self._multi_device_finding(c, t) for c, t in evidence if self._is_determined(c, t)
        )

    def one_device_findings(self) -> list[Finding]:
        """Return what one device loses by itself, the largest first."""
        return _ordered(self._one_device_finding(c, t) for c, t in self._one_device_causes())

    def _one_device_causes(self) -> list[tuple[Cause, tuple[Trial, ...]]]:
        evidence = ((c, c.one_device_evidence(self.design)) for c in self._applicable_causes())
        return [(c, t) for c, t in evidence if self._is_determined(c, t)]

    def _applicable_causes(self) -> Iterator[Cause]:
        return (
            cause
            for cause in applicable_causes(self.design)
            if not cause.skipped_reason(self.design)
        )

    def _is_determined(self, cause: Cause, trials: Sequence[Trial]) -> bool:
        measured = bool(trials) and self.results.has(trials)
        return measured and cause.is_determined(self.design, self.fit.view)

    def _multi_device_finding(self, cause: Cause, trials: Sequence[Trial]) -> Finding:
        found = self._finding(cause, trials, self.attribution.loss(cause))
        if isinstance(cause, UndividedWorkCause) and self.attribution.work_is_undivided:
            # Which samples ranks processed is a fact, however noisy their times are.
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
        most = self.fit.interval(lambda view: self.attribution.speedup(view, max(0.0, lost(view))))
        view = self.fit.view
        if cause.gained_ms(self.design, view) == cause.lost_ms(self.design, view):
            return most
        least = self.fit.interval(
            lambda view: self.attribution.speedup(view, cause.gained_ms(self.design, view))
        )
        return Interval(least.value, least.low, max(most.high or 0.0, least.high or 0.0))

    def _rate_with_fix(self, best: tuple[str, Trial] | None) -> Interval | None:
        return (
            self.attribution.samples_per_s(lambda view: self._gained_ms(best[1], view))
            if best
            else None
        )

    def _speedup_with_fix(self, best: tuple[str, Trial] | None) -> Interval | None:
        if best is None or self.design.devices > 1:
            return None
        return self.fit.interval(
            lambda view: self.attribution.speedup(view, self._gained_ms(best[1], view))
        )

    def _total_ms(self, cause: Cause) -> Interval | None:
        known = cause.is_resolved(self.design, self.fit.view)
        return self.fit.interval(self.attribution.total_loss(cause)) if known else None

    def _rate_without_cause(self, cause: Cause) -> Interval | None:
        if self.design.single_device_script or not cause.is_resolved(self.design, self.fit.view):
            return None
        return self.attribution.samples_per_s(self.attribution.total_loss(cause))

    def _component(self, cause: Cause, name: str) -> Interval:
        return self.fit.interval(lambda view: cause.components(self.design, view)[name])

    def _with_best_fix(self, cause: Cause, found: Finding) -> Finding:
        """Add the best measured fix, if it gains more than the noise.

        A measured gain makes the finding significant, however uncertain its cost is.
        """
        worth = found.lost_ms.value > MIN_STEP_FRACTION * self.attribution.achieved_ms(
            self.fit.view
        )
        best = self._best_fix(cause) if found.significant or worth else None
        if best is None:
            return found
        flag, trial = best
        return dataclasses.replace(
            found,
            fix=flag,
            predicted_speedup=self.fit.interval(
                lambda view: self.attribution.speedup(view, self._gained_ms(trial, view))
            ),
            predicted_samples_per_s=self._rate_with_fix(best),
            evidence=(*found.evidence, *self.results.ids([trial])),
            significant=True,
            fix_measured=True,
        )

    def _best_fix(self, cause: Cause) -> tuple[str, Trial] | None:
        measured = {
            flag: trial
            for flag, trial in cause.fixes(self.design).items()
            if flag and self.results.has([trial])
        }
        if not measured:
            return None
        flag = max(measured, key=lambda flag: self._gained_ms(measured[flag], self.fit.view))
        gained = functools.partial(self._gained_ms, measured[flag])
        significant = self.fit.is_significant(
            self.fit.interval(gained), gained, self.attribution.achieved_ms
        )
        return (flag, measured[flag]) if significant else None

    def _gained_ms(self, trial: Trial, view: MetricView) -> float:
        return self.attribution.saved_ms(trial, view)

    def _one_device_finding(self, cause: Cause, trials: Sequence[Trial]) -> Finding:
        lost = functools.partial(cause.one_device_ms, self.design)

        def gained(view: MetricView) -> float:
            own = self.attribution.one_device_step_ms(view)
            return own / remaining_ms(own, max(0.0, lost(view)), cause.floor_ms(self.design))

        def step(view: MetricView) -> float:
            return view.step(self.design.one_device("real"))

        estimate, step_ms = cause.direct_estimate(self.design), step(self.fit.view)
        cost = estimate or self.fit.interval(lost)
        significant = (
            exceeds_noise(estimate, step_ms)
            if estimate
            else self.fit.is_significant(cost, lost, step)
        )
        large = cost.value > MIN_STEP_FRACTION * step_ms
        best = self._best_fix(cause) if significant or large else None
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
            significant=significant or best is not None,
        )

    def interactions(self, findings: Sequence[Finding]) -> list[Interaction]:
        """Return what pairs of causes cost beyond their sum, if all four trials were measured."""
        found = []
        for pair in cause_pairs(self.design, findings):
            if self.results.has(pair.trials):
                cost = self.fit.interval(pair.lost_ms)
                ids = (pair.first.id, pair.second.id)
                evidence = self.results.ids(pair.trials)
                found.append(Interaction(causes=ids, lost_ms=cost, evidence=evidence))
        return found

    def device_bound(self) -> Speed | None:
        """Return one device without everything that it loses by itself, None if nothing is known.

        Costs of the host may hide each other, so their sum may exceed the host's time: the result is
        at least the time in which the device was busy, less its own losses.
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
    return sorted(findings, key=lambda row: (not row.significant, -row.lost_ms.value))


BATCH_FACTOR = 4


def break_even_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
    """Return the trials of the two lines: two batches on N devices and two on one."""
    batch = design.plan.batch or 1
    on_n = (design.actual(), design.with_plan(batch=BATCH_FACTOR * batch))
    if design.scaling == "strong":
        return (*on_n, design.one_device("real"), design.baseline)
    return (
        *on_n,
        design.one_device("real"),
        design.one_device("real", batch=BATCH_FACTOR * design.batch_per_device),
    )


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
    evidence = results.ids(trials)
    if not math.isfinite(found.value):
        return BreakEvenBatch(devices_help=False, batch=None, evidence=evidence)
    finite = found.high is not None and math.isfinite(found.high)
    batch = Interval(found.value, found.low, found.high if finite else None)
    return BreakEvenBatch(devices_help=False, batch=batch, evidence=evidence)


def break_even_batch(design: ExperimentDesign, view: MetricView) -> float:
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
    return n * max(0.0, fixed_n - fixed) / gained if gained > 0 else math.inf


def build_budget(
    target: str, design: ExperimentDesign, results: TrialResults, *, resamples: int = RESAMPLES
) -> Budget:
    """Return the result of an experiment; the baseline and the actual run must be measured."""
    attribution = Attribution(design, results, resamples)
    builder = FindingBuilder(attribution)
    rows, single = builder.multi_device_findings(), builder.one_device_findings()
    speedup = attribution.fit.interval(attribution.speedup)
    account_builder = StepAccountBuilder(attribution, [*rows, *single])
    account = account_builder.build()
    view = attribution.fit.view
    return Budget(
        target=target,
        plan=design.plan,
        scaling=design.scaling,
        one_device=attribution.speed(design.baseline),
        n_devices=attribution.speed(
            design.actual(), design.devices if attribution.work_is_undivided else 1
        ),
        ideal_ms=attribution.fit.interval(attribution.ideal_ms),
        speedup=speedup,
        rows=tuple(rows),
        one_device_rows=tuple(single),
        interactions=tuple(builder.interactions([*rows, *single])),
        device_bound=builder.device_bound(),
        not_significant_ms=attribution.not_significant_ms(rows if design.devices > 1 else single),
        not_attributed_ms=attribution.not_attributed_ms(rows),
        training_errors=find_training_errors(
            attribution.caveat_texts, attribution.duplicated_epochs, design.profile
        ),
        caveats=(
            *faster_library_caveats(design, results, attribution.achieved_ms(view)),
            *short_step_caveats(design, view.step(design.baseline)),
            *collect_caveats(design, results, attribution.fit),
        ),
        unmeasured=tuple(unmeasured_causes(design, results, view)),
        lower_bound=epoch_boundary_lower_bound(design, results, view),
        break_even_batch=None
        if design.single_device_script or design.devices == 1
        else find_break_even_batch(design, results, attribution.fit, speedup),
        parallelism=headline.describe_parallelism(design.profile) if design.profile else "",
        headline=_headline(target, design),
        account=account,
        changes=account_builder.changes(account),
        trials=account_builder.trials(),
        uses_one_device=design.single_device_script,
        not_applicable=tuple(
            cause.id for cause in applicable_causes(design) if cause.skipped_reason(design)
        ),
    )


def _headline(target: str, design: ExperimentDesign) -> str:
    if design.profile is None:
        return ""
    failure = design.multi_process_failure
    return headline.write_headline(target, design.profile, design.devices, failure)
