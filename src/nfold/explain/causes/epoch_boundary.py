"""Time between epochs and between steps: worker starts, evaluations, checkpoints, logs.

It includes the work of one rank while the others wait, and the wait for the first batch of an
epoch: the shorter epochs are, the larger is its share of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nfold.explain.advice import pytorch
from nfold.explain.causes.cause import Cause
from nfold.explain.causes.cost_model import CostModel
from nfold.explain.causes.launch_bound import idle_trial, shared_host_gap_ms
from nfold.explain.design import ExperimentDesign, Trial, over_short_epochs, over_whole_epochs
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.estimate.samples import Samples

TrialPredicate = Callable[[Trial], bool]
TrialValue = Callable[[Trial], Samples]
ENDLESS_BATCHES = 10_000_000  # per epoch: a day at 9 ms per batch


class EpochBoundaryCause(Cause):
    """Time between two epochs, over the steps of an epoch, and periodic work within epochs."""

    def costs(self, design: ExperimentDesign) -> EpochBoundaryCosts:
        return EpochBoundaryCosts(design)

    def one_device_fix(self, design: ExperimentDesign, view: MetricView) -> str:
        whole_ms = float(self.costs(design).one_device_ms(view))
        return self._advice(design, view, design.baseline, whole_ms)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        whole_ms = float(self.costs(design).total_ms(view))
        return self._advice(design, view, design.actual(), whole_ms)

    def _advice(
        self, design: ExperimentDesign, view: MetricView, trial: Trial, whole_ms: float
    ) -> str:
        host_gap_ms = float(shared_host_gap_ms(design, view))
        if design.profile is not None and host_gap_ms > 0 and 2 * host_gap_ms >= whole_ms:
            return pytorch.reduce_host_gap(design, host_gap_ms)
        gap = float(view.epoch_gap(trial)) if view.has_epoch_gap(trial) else 0.0
        periodic = self.costs(design).has_periodic_work(view)
        within = float(view.periodic_ms(trial)) if periodic else 0.0
        if design.profile is not None and within > gap:
            periods = (view.metric(one, "period") for one in (trial, design.baseline))
            every = float(next((one for one in periods if one is not None), 1.0))
            return pytorch.reduce_periodic_work(design, every, within * every)
        if design.profile is not None:
            waits = 2 * float(view.first_batch_wait(trial)) > gap
            return pytorch.shorten_epoch_boundary(
                design.profile, waits=waits, ranks=design.gap_locations
            )
        return (
            "keep loader workers alive between epochs (persistent_workers), and evaluate and log "
            "less often"
        )


EPOCH_BOUNDARY = EpochBoundaryCause("epoch-boundary")


class EpochBoundaryCosts(CostModel):
    """The time between steps, of the real run and of the baseline.

    If epochs are short, the usual trials contain epoch boundaries. Else further trials run whole
    epochs, or epochs cut short, which have the same boundaries. Any trial shows periodic work.
    """

    @property
    def trials(self) -> tuple[Trial, ...]:
        return self._ends if self.design.devices > 1 else ()

    @property
    def one_device_trials(self) -> tuple[Trial, ...]:
        return (self.design.baseline,)

    @property
    def refining_trials(self) -> tuple[Trial, ...]:
        # The same over whole or short epochs, and the trial that shows host gaps.
        own = (*map(over_whole_epochs, self._ends), *short_epoch_trials(self.design))
        return own if self.design.profile is None else (*own, idle_trial(self.design))

    def is_determined(self, view: MetricView) -> bool:
        known = self.has_epoch_gaps(view) or self.has_periodic_work(view)
        return known or float(shared_host_gap_ms(self.design, view)) > 0

    def unknown_part(self, view: MetricView) -> str | None:
        """Return which part is unknown: empty for the whole, None if all is known."""
        full, every = self.design.actual(), view.metric(self.design.actual(), "period")
        if every is not None and not self.has_periodic_work(view):
            cost = f"{view.periodic_ms(full):.2f} ms per step of work after every {every:.0f} steps"
            return f"{cost}, which was not measured on one device: "
        if not self.is_determined(view):
            return ""
        return None if self.has_epoch_gaps(view) else "its epoch boundaries: "

    def has_epoch_gaps(self, view: MetricView) -> bool:
        """Return whether both trials have had an epoch boundary."""
        return all(map(view.has_epoch_gap, self._ends))

    def has_periodic_work(self, view: MetricView) -> bool:
        """Return whether there is periodic work, and it is known in both trials."""
        some = any(view.metric(trial, "period") is not None for trial in self._ends)
        return some and all(map(view.has_periodic, self._ends))

    def ms_per_step(self, view: MetricView, trial: Trial) -> Samples:
        """Return the milliseconds per step that are known of a trial."""
        return sum(value(trial) for has, value in self._measured_values(view) if has(trial))

    def saved_ms(self, view: MetricView, trial: Trial) -> Samples:
        """Return the milliseconds per step that a trial saves, as far as they are known."""
        full = self.design.actual()
        known = [value for has, value in self._measured_values(view) if has(trial)]
        return sum(value(full) - value(trial) for value in known)

    def lost_ms(self, view: MetricView) -> Samples:
        return self.ms_per_step(view, self.design.actual()) - self._one_device_ms(view)

    def components(self, view: MetricView) -> dict[str, Samples]:
        full, one = self._ends
        gaps, periodic = self.has_epoch_gaps(view), self.has_periodic_work(view)

        def more(value: TrialValue) -> Samples:
            return value(full) - value(one) / self.design.work_divisor

        within = more(view.periodic_ms) if periodic else 0.0
        between = self.lost_ms(view) - within
        found = {}
        if gaps and self.design.facts.training_loader.num_workers:
            first = more(view.first_batch_wait)
            found = {
                "waiting for the first batch of an epoch": first,
                "other work between epochs": between - first,
            }
        elif gaps and periodic:
            found = {"between epochs": between}
        return found | ({"periodic work within epochs": within} if gaps and periodic else {})

    def one_device_ms(self, view: MetricView) -> Samples:
        return self._one_device_ms(view) + shared_host_gap_ms(self.design, view)

    @property
    def _ends(self) -> tuple[Trial, Trial]:
        return self.design.actual(), self.design.baseline

    def _measured_values(self, view: MetricView) -> Iterator[tuple[TrialPredicate, TrialValue]]:
        if self.has_epoch_gaps(view):
            yield view.has_epoch_gap, view.epoch_gap
        if self.has_periodic_work(view):
            yield view.has_periodic, view.periodic_ms

    def _one_device_ms(self, view: MetricView) -> Samples:
        return self.ms_per_step(view, self.design.baseline) / self.design.work_divisor


def endless_reason(design: ExperimentDesign) -> str | None:
    """Return why no epoch ends, or None."""
    loader = design.facts.training_loader
    if loader.renewed_at is not None:
        return "every step makes an iterator: no epoch ends"
    batches = loader.batches_per_epoch or 0
    if batches <= ENDLESS_BATCHES:
        return None
    return f"an epoch has {batches:,} batches: no epoch ends"


def short_epoch_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
    """Return the trials over short epochs, if a script has epochs that can be cut short."""
    loader = design.facts.training_loader
    fixed = loader.length_read_ahead or endless_reason(design) is not None
    if not loader.batches_per_epoch or fixed:
        return ()
    return tuple(map(over_short_epochs, (design.actual(), design.baseline)))
