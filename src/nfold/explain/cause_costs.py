"""Steps, speeds and costs of an experiment, as functions of its fitted values. Pure functions."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from nfold.core.stats import Interval
from nfold.explain.advice import pytorch
from nfold.explain.causes import CAUSES_BY_ID, applicable_causes
from nfold.explain.causes.cause import skipped_reason
from nfold.explain.causes.epoch_boundary import EPOCH_BOUNDARY
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import RESAMPLES, MetricView, Statistic
from nfold.explain.estimate.samples import Samples
from nfold.explain.result.budget import Speed
from nfold.explain.trials import TrialResults
from nfold.launch.training_checks import (
    AUGMENTED_COPIES,
    OUT_OF_STEP,
    SAME_ORDER,
    SAME_SAMPLES,
)

MIN_REMAINING_FRACTION = 1e-3  # of a step: no gain leaves less


class Attribution:
    """Steps and speeds of one experiment, as functions of its fitted values.

    ``costs`` are those of all causes that apply, by their ids. Steps are in milliseconds, with their
    share of the time between epochs.
    """

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
        self.costs = {
            cause.id: cause.costs(design)
            for cause in applicable_causes(design)
            if not skipped_reason(cause, design)
        }
        self._epochs = EPOCH_BOUNDARY.costs(design)
        actual = results.runs[design.actual()].values()
        # Only trials over short epochs reach the second one. The probe run knows more about errors of
        # the training.
        orders = [
            one for m in results.measurements() for one in m.warnings if one.kind == SAME_ORDER
        ]
        every = [*orders, *(one for m in actual for one in m.warnings), *design.probe_caveats]
        self.caveat_texts = {one.kind: one.text for one in every}
        if results.out_of_step:
            self.caveat_texts[OUT_OF_STEP] = results.out_of_step
        # Whether every rank processed the same samples: in the same order, or each in its own. In the
        # same order with another augmentation may be intended.
        same = SAME_SAMPLES in self.caveat_texts
        in_order = same or AUGMENTED_COPIES in self.caveat_texts
        self.duplicated_epochs = None if in_order else pytorch.duplicated_epochs(design.facts)
        self.work_is_undivided = same or self.duplicated_epochs is not None

    def ideal_ms(self, view: MetricView) -> Samples:
        """Return a step at N-fold speed."""
        return self._step_ms(self.design.baseline, view) / self.design.work_divisor

    def achieved_ms(self, view: MetricView) -> Samples:
        """Return the time of a step's worth of distinct samples on N devices."""
        step = self._step_ms(self.design.actual(), view)
        return step * (self.design.devices if self.work_is_undivided else 1)

    def one_device_step_ms(self, view: MetricView) -> Samples:
        """Return a step of one device with its share of the batch."""
        gap = self._epochs.ms_per_step(view, self.design.baseline)
        return view.step(self.design.one_device("real")) + gap / self.design.work_divisor

    def compute_ms(self, lost_ms: Mapping[str, Statistic], view: MetricView) -> Samples:
        """Return a step of one device without the costs ``lost_ms`` of its own, by cause.

        Costs of the host may hide each other, so their sum may exceed the host's time: the result is
        at least the time in which the device was busy, less its own losses.
        """
        lost = {cause: ms(view) for cause, ms in lost_ms.items()}
        floor_ms = max((self.costs[cause].floor_ms() for cause in lost), default=0.0)
        busy_ms = floor_ms - sum(ms for c, ms in lost.items() if CAUSES_BY_ID[c].occupies_device)
        return remaining_ms(self.one_device_step_ms(view), sum(lost.values()), busy_ms)

    def speedup(self, view: MetricView, gained_ms: Samples = 0.0) -> Samples:
        """Return the throughput of N devices, a step ``gained_ms`` shorter, over that of one."""
        step = remaining_ms(self.achieved_ms(view), gained_ms)
        return self.design.devices * self.ideal_ms(view) / step

    def speed(self, trial: Trial, identical_batches: int = 1) -> Speed:
        """Return throughput and step. Of ``identical_batches``, one counts."""
        counted = 1e3 * (trial.plan.batch or 1) / identical_batches
        step = functools.partial(self._step_ms, trial)
        rate = self.fit.interval(lambda view: counted / step(view))
        return Speed(samples_per_s=rate, step_ms=self.fit.interval(step))

    def samples_per_s(self, gained_ms: Statistic) -> Interval:
        """Return distinct samples per second on N devices, a step ``gained_ms`` shorter."""
        samples = 1e3 * (self.design.plan.batch or 1)
        return self.fit.interval(
            lambda v: samples / remaining_ms(self.achieved_ms(v), gained_ms(v))
        )

    def saved_ms(self, trial: Trial, view: MetricView) -> Samples:
        """Return by how much a step of another trial on N devices is shorter."""
        gained = view.step(self.design.actual()) - view.step(trial)
        return gained + self._epochs.saved_ms(view, trial)

    def is_faster(self, trial: Trial) -> bool:
        """Return whether another trial on N devices saves time beyond the noise."""
        saved = functools.partial(self.saved_ms, trial)
        return self.fit.is_significant(self.fit.interval(saved), saved, self.achieved_ms)

    def measured_fixes(self, cause: str) -> dict[str, Trial]:
        """Return the fixes of a cause that were measured, by flag or advice."""
        fixes = CAUSES_BY_ID[cause].fixes(self.design)
        return {flag: t for flag, t in fixes.items() if flag and self.results.has([t])}

    def _step_ms(self, trial: Trial, view: MetricView) -> Samples:
        return view.step(trial) + self._epochs.ms_per_step(view, trial)


def remaining_ms(step_ms: Samples, gained_ms: Samples, floor_ms: Samples = 0.0) -> Samples:
    """Return a step after a gain: at least ``floor_ms`` and a small fraction of the step."""
    least = np.maximum(MIN_REMAINING_FRACTION * step_ms, np.minimum(floor_ms, step_ms))
    return np.maximum(least, step_ms - gained_ms)
