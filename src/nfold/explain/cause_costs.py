"""Steps, speeds and costs of an experiment, as functions of its fitted values. Pure functions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from nfold.core.stats import Interval
from nfold.explain.advice import pytorch
from nfold.explain.causes import CAUSES_BY_ID, Cause
from nfold.explain.causes.cause import remaining_ms
from nfold.explain.causes.epoch_boundary import EpochBoundaryCause
from nfold.explain.causes.work_division import SAME_SAMPLES, UndividedWorkCause
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import RESAMPLES, BootstrapFit, MetricView, Statistic
from nfold.explain.result.budget import Finding, Speed
from nfold.explain.trials import TrialResults

EPOCH_BOUNDARY = EpochBoundaryCause()


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
        self.design = design
        self.results = results
        self.fit: BootstrapFit = results.fit(resamples, final=final)
        actual = results.runs[design.actual()].values()
        self.caveat_texts = {one.kind: one.text for m in actual for one in m.warnings}

    @property
    def work_is_undivided(self) -> bool:
        """Whether every rank processed the same samples, in any order."""
        return SAME_SAMPLES in self.caveat_texts or self.duplicated_epochs is not None

    @property
    def duplicated_epochs(self) -> str | None:
        """The error text if every rank of a script visits the whole data set in its own order."""
        profile = self.design.profile
        if profile is None or SAME_SAMPLES in self.caveat_texts:
            return None
        return pytorch.duplicated_epochs(profile)

    def ideal_ms(self, view: MetricView) -> float:
        """Return a step at N-fold speed."""
        return self._step_with_gap_ms(self.design.baseline, view) / self.design.work_divisor

    def achieved_ms(self, view: MetricView) -> float:
        """Return the time of a step's worth of distinct samples on N devices."""
        step = self._step_with_gap_ms(self.design.actual(), view)
        return step * (self.design.devices if self.work_is_undivided else 1)

    def _step_with_gap_ms(self, trial: Trial, view: MetricView) -> float:
        return view.step(trial) + self._gap_ms(trial, view)

    def _gap_ms(self, trial: Trial, view: MetricView) -> float:
        return EPOCH_BOUNDARY.ms_per_step(self.design, view, trial)

    def speedup(self, view: MetricView, gained_ms: float = 0.0) -> float:
        """Return the throughput of N devices, a step ``gained_ms`` shorter, over that of one."""
        step = remaining_ms(self.achieved_ms(view), gained_ms)
        return self.design.devices * self.ideal_ms(view) / step

    def one_device_step_ms(self, view: MetricView) -> float:
        """Return a step of one device with its share of the batch."""
        gap = self._gap_ms(self.design.baseline, view) / self.design.work_divisor
        return view.step(self.design.one_device("real")) + gap

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

    def saved_ms(self, trial: Trial, view: MetricView) -> float:
        """Return by how much a step of another trial on N devices is shorter, with epoch gaps."""
        gained = view.step(self.design.actual()) - view.step(trial)
        return gained + EPOCH_BOUNDARY.saved_ms(self.design, view, trial)

    def loss(self, cause: Cause) -> Statistic:
        """Return what N devices lose to a cause beyond what one loses."""
        if isinstance(cause, UndividedWorkCause) and not self.work_is_undivided:
            return lambda view: 0.0
        if not self.work_is_undivided or cause.id != EPOCH_BOUNDARY.id:
            return lambda view: cause.lost_ms(self.design, view)
        # The same samples are N times as many epochs, with N times as many boundaries.
        more, actual = self.design.devices - 1, self.design.actual()
        return lambda view: cause.lost_ms(self.design, view) + more * self._gap_ms(actual, view)

    def total_loss(self, cause: Cause) -> Statistic:
        """Return everything that a step on N devices loses to a cause."""
        if isinstance(cause, UndividedWorkCause):
            return self.loss(cause)
        return lambda view: cause.total_ms(self.design, view)

    def one_device_loss(self, cause: Cause) -> Statistic:
        """Return what one device loses to a cause by itself, at least 0."""
        gains = cause.one_device_ms(self.design, self.fit.view) <= 0
        return lambda view: 0.0 if gains else cause.one_device_ms(self.design, view)

    def not_significant_ms(self, rows: Sequence[Finding]) -> Interval:
        """Return the sum of all findings within the noise."""
        costs = [self._loss_of(CAUSES_BY_ID[row.cause]) for row in rows if not row.significant]
        return self.fit.interval(lambda view: sum(cost(view) for cost in costs))

    def _loss_of(self, cause: Cause) -> Statistic:
        return self.loss(cause) if self.design.devices > 1 else self.one_device_loss(cause)

    def not_attributed_ms(self, rows: Sequence[Finding]) -> Interval:
        """Return what is missing to N-fold speed less all findings."""
        costs = [self.loss(CAUSES_BY_ID[row.cause]) for row in rows]

        def residual(view: MetricView) -> float:
            missing = self.achieved_ms(view) - self.ideal_ms(view)
            return missing - sum(cost(view) for cost in costs)

        return self.fit.interval(residual)
