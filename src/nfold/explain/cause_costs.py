"""Steps, speeds and costs of an experiment, as functions of its fitted values. Pure functions."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from nfold.core.stats import Interval
from nfold.explain.advice import pytorch
from nfold.explain.causes import CAUSES_BY_ID, Cause
from nfold.explain.causes.cause import remaining_ms
from nfold.explain.causes.epoch_boundary import EPOCH_BOUNDARY
from nfold.explain.causes.work_division import UndividedWorkCause
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import RESAMPLES, MetricView, Statistic
from nfold.explain.estimate.samples import Samples
from nfold.explain.result.budget import Finding, Speed
from nfold.explain.trials import TrialResults
from nfold.launch.training_checks import OUT_OF_STEP, SAME_SAMPLES


class Attribution:
    """Steps, speeds and costs of one experiment, as functions of its fitted values."""

    def __init__(
        self,
        design: ExperimentDesign,
        results: TrialResults,
        resamples: int = RESAMPLES,
        *,
        final: bool = True,
    ) -> None:
        self.design, self.results = design, results
        self.fit = results.fit(resamples, final=final)
        self.view = self.fit.view
        actual = results.runs[design.actual()].values()
        every = [*design.probe_caveats, *(one for m in actual for one in m.warnings)]
        self.caveat_texts = {one.kind: one.text for one in every}
        if results.out_of_step:
            self.caveat_texts[OUT_OF_STEP] = results.out_of_step
        # Whether every rank processed the same samples: in the same order, or each in its own.
        same = SAME_SAMPLES in self.caveat_texts
        self.duplicated_epochs = None if same else pytorch.duplicated_epochs(design.facts)
        self.work_is_undivided = same or self.duplicated_epochs is not None

    def ideal_ms(self, view: MetricView) -> Samples:
        """Return a step at N-fold speed."""
        return self._step_with_gap_ms(self.design.baseline, view) / self.design.work_divisor

    def achieved_ms(self, view: MetricView) -> Samples:
        """Return the time of a step's worth of distinct samples on N devices."""
        step = self._step_with_gap_ms(self.design.actual(), view)
        return step * (self.design.devices if self.work_is_undivided else 1)

    def _step_with_gap_ms(self, trial: Trial, view: MetricView) -> Samples:
        return view.step(trial) + EPOCH_BOUNDARY.ms_per_step(self.design, view, trial)

    def one_device_step_ms(self, view: MetricView) -> Samples:
        """Return a step of one device with its share of the batch."""
        gap = EPOCH_BOUNDARY.ms_per_step(self.design, view, self.design.baseline)
        return view.step(self.design.one_device("real")) + gap / self.design.work_divisor

    def compute_ms(self, costs: Mapping[Cause, Statistic], view: MetricView) -> Samples:
        """Return a step of one device without these ``costs`` of its own.

        Costs of the host may hide each other, so their sum may exceed the host's time: the result is
        at least the time in which the device was busy, less its own losses.
        """
        lost = {cause: cost(view) for cause, cost in costs.items()}
        floor_ms = max((cause.floor_ms(self.design) for cause in costs), default=0.0)
        busy_ms = floor_ms - sum(ms for cause, ms in lost.items() if cause.occupies_device)
        return remaining_ms(self.one_device_step_ms(view), sum(lost.values()), busy_ms)

    def speedup(self, view: MetricView, gained_ms: Samples = 0.0) -> Samples:
        """Return the throughput of N devices, a step ``gained_ms`` shorter, over that of one."""
        step = remaining_ms(self.achieved_ms(view), gained_ms)
        return self.design.devices * self.ideal_ms(view) / step

    def speedup_after(self, gained_ms: Statistic) -> Interval:
        """Return the speedup with a step ``gained_ms`` shorter."""
        return self.fit.interval(lambda view: self.speedup(view, gained_ms(view)))

    def speed(self, trial: Trial, identical_batches: int = 1) -> Speed:
        """Return throughput and step, with the time between epochs. Of ``identical_batches``, one
        counts.
        """
        counted = 1e3 * (trial.plan.batch or 1) / identical_batches
        rate = self.fit.interval(lambda view: counted / self._step_with_gap_ms(trial, view))
        step = functools.partial(self._step_with_gap_ms, trial)
        return Speed(samples_per_s=rate, step_ms=self.fit.interval(step))

    def samples_per_s(self, gained_ms: Statistic) -> Interval:
        """Return distinct samples per second on N devices, a step ``gained_ms`` shorter."""
        samples = 1e3 * (self.design.plan.batch or 1)
        return self.fit.interval(
            lambda v: samples / remaining_ms(self.achieved_ms(v), gained_ms(v))
        )

    def saved_ms(self, trial: Trial, view: MetricView) -> Samples:
        """Return by how much a step of another trial on N devices is shorter, with epoch gaps."""
        gained = view.step(self.design.actual()) - view.step(trial)
        return gained + EPOCH_BOUNDARY.saved_ms(self.design, view, trial)

    def is_faster(self, trial: Trial) -> bool:
        """Return whether another trial on N devices saves time beyond the noise."""
        saved = functools.partial(self.saved_ms, trial)
        return self.fit.is_significant(self.fit.interval(saved), saved, self.achieved_ms)

    def measured_fixes(self, cause: Cause) -> dict[str, Trial]:
        """Return the fixes of a cause that were measured, by flag or advice."""
        fixes = cause.fixes(self.design)
        return {flag: t for flag, t in fixes.items() if flag and self.results.has([t])}

    def component(self, cause: Cause, name: str) -> Statistic:
        """Return a part of what N devices lose to a cause."""
        return lambda view: cause.components(self.design, view)[name]

    def loss(self, cause: Cause) -> Statistic:
        """Return what N devices lose to a cause beyond what one loses."""
        if isinstance(cause, UndividedWorkCause) and not self.work_is_undivided:
            return lambda view: 0.0
        if not self.work_is_undivided or cause is not EPOCH_BOUNDARY:
            return functools.partial(cause.lost_ms, self.design)
        # The same samples are N times as many epochs, with N times as many boundaries.
        more, actual = self.design.devices - 1, self.design.actual()
        return lambda view: (
            cause.lost_ms(self.design, view)
            + more * EPOCH_BOUNDARY.ms_per_step(self.design, view, actual)
        )

    def total_loss(self, cause: Cause) -> Statistic:
        """Return everything that a step on N devices loses to a cause."""
        if isinstance(cause, UndividedWorkCause):
            return self.loss(cause)
        return functools.partial(cause.total_ms, self.design)

    def one_device_loss(self, cause: Cause) -> Statistic:
        """Return what one device loses to a cause by itself, at least 0."""
        if cause.one_device_ms(self.design, self.view) <= 0:
            return lambda view: 0.0
        return functools.partial(cause.one_device_ms, self.design)

    def not_significant_ms(self, rows: Sequence[Finding]) -> Interval:
        """Return the sum of all findings within the noise."""
        loss = self.loss if self.design.devices > 1 else self.one_device_loss
        costs = [loss(CAUSES_BY_ID[row.cause]) for row in rows if not row.significant]
        return self.fit.interval(lambda view: sum(cost(view) for cost in costs))

    def not_attributed_ms(self, rows: Sequence[Finding]) -> Interval:
        """Return what is missing to N-fold speed less all findings."""
        costs = [self.loss(CAUSES_BY_ID[row.cause]) for row in rows]

        def residual(view: MetricView) -> Samples:
            missing = self.achieved_ms(view) - self.ideal_ms(view)
            return missing - sum(cost(view) for cost in costs)

        return self.fit.interval(residual)
