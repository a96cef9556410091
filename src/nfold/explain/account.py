"""What the runs of a ladder say of its steps, and of what causes take of them. Pure functions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from nfold.explain import lines
from nfold.explain.causes import CAUSES_BY_ID, Cause
from nfold.explain.causes.base import remaining_ms
from nfold.explain.causes.epoch_boundary import EpochBoundaryCause
from nfold.explain.causes.undivided_work import SAME_SAMPLES, UndividedWorkCause
from nfold.explain.fit import RESAMPLES, BootstrapFit, Statistic
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.measured import TrialResults
from nfold.explain.rung import Trial
from nfold.explain.view import MetricView
from nfold.finding import Finding, Speed
from nfold.stats import Interval

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
            else lines.duplicated_epochs(seen)
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
        """What is in no usual step: a part of it, where that was measured at both ends."""
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
