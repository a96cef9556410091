"""What the runs of a ladder say of its steps, and of what causes take of them. Pure functions."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from nfold.core.stats import Interval
from nfold.explain.advice import headline, pytorch
from nfold.explain.advice.caveats import (
    collect_caveats,
    epoch_boundary_lower_bound,
    faster_library_caveats,
    find_training_errors,
    short_step_caveats,
    unmeasured_causes,
)
from nfold.explain.causes import CAUSES, CAUSES_BY_ID, Cause, applicable_causes
from nfold.explain.causes.cause import remaining_ms
from nfold.explain.causes.epoch_boundary import EpochBoundaryCause
from nfold.explain.causes.work_division import SAME_SAMPLES, UndividedWorkCause
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

EPOCH_BOUNDARY = EpochBoundaryCause()


class Attribution:
    """One budget while it is made: the ladder, its runs, their fitted values."""

    def __init__(
        self,
        design: ExperimentDesign,
        results: TrialResults,
        resamples: int = RESAMPLES,
        *,
        final: bool = True,
    ) -> None:
        self.design = design
        self.results = results
        self.fit: BootstrapFit = results.fit(resamples, final=final)
        full = results.runs[design.actual()].values()
        self.caveat_texts = {doubt.kind: doubt.text for m in full for doubt in m.warnings}

    @property
    def work_is_undivided(self) -> bool:
        """Whether every rank was fed the same samples, in the same order or another."""
        return SAME_SAMPLES in self.caveat_texts or self.duplicated_epochs is not None

    @property
    def duplicated_epochs(self) -> str | None:
        """That ranks of a script go through the whole data set, each in its own order."""
        seen = self.design.profile
        return (
            None
            if seen is None or SAME_SAMPLES in self.caveat_texts
            else pytorch.duplicated_epochs(seen)
        )

    def ideal_ms(self, view: MetricView) -> float:
        """A step at N-fold speed."""
        return self._step_with_gap_ms(self.design.baseline, view) / self.design.work_divisor

    def achieved_ms(self, view: MetricView) -> float:
        """A step's worth of distinct samples on N devices."""
        step = self._step_with_gap_ms(self.design.actual(), view)
        return step * (self.design.devices if self.work_is_undivided else 1)

    def _step_with_gap_ms(self, trial: Trial, view: MetricView) -> float:
        return view.step(trial) + self._gap_ms(trial, view)

    def _gap_ms(self, trial: Trial, view: MetricView) -> float:
        return EPOCH_BOUNDARY.ms_per_step(self.design, view, trial)

    def speedup(self, view: MetricView, gained_ms: float = 0.0) -> float:
        """Throughput of N devices over that of one, after so much is gained."""
        rest = remaining_ms(self.achieved_ms(view), gained_ms)
        return self.design.devices * self.ideal_ms(view) / rest

    def one_device_step_ms(self, view: MetricView) -> float:
        """A step of one device alone with its share of the batch."""
        between = self._gap_ms(self.design.baseline, view) / self.design.work_divisor
        return view.step(self.design.one_device("real")) + between

    def speed(self, trial: Trial, identical_batches: int = 1) -> Speed:
        """Rate and step, time between epochs included; of ``times`` equal batches one counts."""
        counted = 1e3 * (trial.plan.batch or 1) / identical_batches
        rate = self.fit.interval(lambda view: counted / self._step_with_gap_ms(trial, view))
        step = functools.partial(self._step_with_gap_ms, trial)
        return Speed(samples_per_s=rate, step_ms=self.fit.interval(step))

    def samples_per_s(self, gained_ms: Statistic) -> Interval:
        """Distinct samples a second on N devices, after so much is gained."""
        samples = 1e3 * (self.design.plan.batch or 1)
        return self.fit.interval(
            lambda v: samples / remaining_ms(self.achieved_ms(v), gained_ms(v))
        )

    def saved_ms(self, trial: Trial, view: MetricView) -> float:
        """What a step of another trial on N devices is shorter, time between epochs included."""
        gained = view.step(self.design.actual()) - view.step(trial)
        return gained + EPOCH_BOUNDARY.saved_ms(self.design, view, trial)

    def loss(self, cause: Cause) -> Statistic:
        """Its cost; ranks that were fed what they should repeat nothing."""
        if isinstance(cause, UndividedWorkCause) and not self.work_is_undivided:
            return lambda view: 0.0
        if not self.work_is_undivided or cause.id != EPOCH_BOUNDARY.id:
            return lambda view: cause.lost_ms(self.design, view)
        # Divided, the same samples are N times as many epochs, with as many ends.
        more, full = self.design.devices - 1, self.design.actual()
        return lambda view: cause.lost_ms(self.design, view) + more * self._gap_ms(full, view)

    def total_loss(self, cause: Cause) -> Statistic:
        """All that a step on N devices loses to it, what one loses in the same way too."""
        if isinstance(cause, UndividedWorkCause):
            return self.loss(cause)
        return lambda view: cause.total_ms(self.design, view)

    def one_device_loss(self, cause: Cause) -> Statistic:
        """Of one device by itself. What would be slower without a cause loses nothing to it."""
        gains = cause.one_device_ms(self.design, self.fit.view) <= 0
        return lambda view: 0.0 if gains else cause.one_device_ms(self.design, view)

    def not_significant_ms(self, rows: Sequence[Finding]) -> Interval:
        """What the rows without a name cost together, those of one device where it is the only."""
        costs = [self._loss_of(CAUSES_BY_ID[row.cause]) for row in rows if not row.significant]
        return self.fit.interval(lambda view: sum(cost(view) for cost in costs))

    def _loss_of(self, cause: Cause) -> Statistic:
        return self.loss(cause) if self.design.devices > 1 else self.one_device_loss(cause)

    def not_attributed_ms(self, rows: Sequence[Finding]) -> Interval:
        """What is missing to N-fold less all rows, losses or gains."""
        costs = [self.loss(CAUSES_BY_ID[row.cause]) for row in rows]

        def rest(view: MetricView) -> float:
            missing = self.achieved_ms(view) - self.ideal_ms(view)
            return missing - sum(cost(view) for cost in costs)

        return self.fit.interval(rest)


@dataclass(frozen=True)
class CausePair:
    """Two causes that can both be taken away from the real run, each alone and together."""

    first: Cause
    second: Cause
    design: ExperimentDesign

    @property
    def trials(self) -> tuple[Trial, Trial, Trial, Trial]:
        """The real run; without the first, the second, and both."""
        left_out = (self.first.removal, self.second.removal)
        both = left_out[0].merge(left_out[1])
        without = (Trial(plan=self.design.plan, variant=one) for one in (*left_out, both))
        first, second, neither = without
        return (self.design.actual(), first, second, neither)

    def lost_ms(self, view: MetricView) -> float:
        """What both cost together beyond the sum of each alone."""
        real, first, second, neither = map(view.step, self.trials)
        return first + second - real - neither


def cause_pairs(design: ExperimentDesign, findings: Sequence[Finding]) -> Iterator[CausePair]:
    """Pairs of the three largest of these findings that can be taken away from the real run."""
    names = [row.cause for row in sorted(findings, key=lambda row: -row.lost_ms.value)]
    removable = [c for c in CAUSES if c.removal and c.removal.refusal(design.plan) is None]
    by_name = {cause.id: cause for cause in removable}
    largest = [by_name[name] for name in dict.fromkeys(names) if name in by_name][:3]
    for first, second in combinations(largest, 2):
        yield CausePair(first, second, design)


# The rows of a budget: what a cause costs N devices, and one by itself, and what would remove it.
#
# Pure functions.


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
        return self.attribution.saved_ms(trial, view)

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
    return sorted(findings, key=lambda row: (not row.significant, -row.lost_ms.value))


BATCH_FACTOR = 4


def break_even_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
    """The steps that the lines go through: two batches on N devices and two on one."""
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
    """The limit, where N devices are slower than one; None where they help."""
    if speedup.high is None or speedup.high >= 1:
        return None
    asked = break_even_trials(design)
    if not results.has(asked):
        return BreakEvenBatch(devices_help=False, batch=None, evidence=())
    found = fit.interval(lambda view: break_even_batch(design, view))
    evidence = results.ids(asked)
    if not math.isfinite(found.value):
        return BreakEvenBatch(devices_help=False, batch=None, evidence=evidence)
    finite = found.high is not None and math.isfinite(found.high)
    batch = Interval(found.value, found.low, found.high if finite else None)
    return BreakEvenBatch(devices_help=False, batch=batch, evidence=evidence)


def break_even_batch(design: ExperimentDesign, view: MetricView) -> float:
    """The global batch at which a sample takes N devices as long as one; infinite: at none.

    With x samples a device, one device takes a + b·x a step and N take c + d·x over N·x. Strong
    scaling gives one device all N·x in a step, weak scaling x in each of N steps.
    """
    n = design.devices
    many, more, share, other = (view.step(rung) for rung in break_even_trials(design))
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
    """Where the rest of N-fold went, as far as was measured; ``one`` and ``full`` were.

    Of one device, where the rest of what its compute alone would do went.
    """
    account = Attribution(design, results, resamples)
    made = FindingBuilder(account)
    rows, single = made.multi_device_findings(), made.one_device_findings()
    speedup = account.fit.interval(account.speedup)
    step = StepAccountBuilder(account, [*rows, *single])
    step_account = step.build()
    return Budget(
        target=target,
        plan=design.plan,
        scaling=design.scaling,
        one_device=account.speed(design.baseline),
        n_devices=account.speed(
            design.actual(), design.devices if account.work_is_undivided else 1
        ),
        ideal_ms=account.fit.interval(account.ideal_ms),
        speedup=speedup,
        rows=tuple(rows),
        one_device_rows=tuple(single),
        interactions=tuple(made.interactions([*rows, *single])),
        device_bound=made.device_bound(),
        not_significant_ms=account.not_significant_ms(rows if design.devices > 1 else single),
        not_attributed_ms=account.not_attributed_ms(rows),
        training_errors=find_training_errors(
            account.caveat_texts, account.duplicated_epochs, design.profile
        ),
        caveats=(
            *faster_library_caveats(design, results, account.achieved_ms(account.fit.view)),
            *short_step_caveats(design, account.fit.view.step(design.baseline)),
            *collect_caveats(design, results, account.fit),
        ),
        unmeasured=tuple(unmeasured_causes(design, results, account.fit.view)),
        lower_bound=epoch_boundary_lower_bound(design, results, account.fit.view),
        break_even_batch=None
        if design.single_device_script or design.devices == 1
        else find_break_even_batch(design, results, account.fit, speedup),
        parallelism=headline.describe_parallelism(design.profile) if design.profile else "",
        headline=_headline(target, design),
        account=step_account,
        changes=step.changes(step_account),
        trials=step.trials(),
        uses_one_device=design.single_device_script,
        not_applicable=tuple(
            cause.id for cause in applicable_causes(design) if cause.skipped_reason(design)
        ),
    )


def _headline(target: str, design: ExperimentDesign) -> str:
    seen = design.profile
    return (
        ""
        if seen is None
        else headline.write_headline(target, seen, design.devices, design.multi_process_failure)
    )
