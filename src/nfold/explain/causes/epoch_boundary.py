"""C8: time between epochs, and between steps: workers that start anew, evaluations, logs.

One rank's work while the others wait is such a thing, too. The first batch of an epoch is waited
for, as long as a worker makes it: the shorter epochs are, the more of a step that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from nfold.explain.advice import pytorch
from nfold.explain.causes.cause import Cause, cached_per_view
from nfold.explain.causes.launch_bound import idle_trial, shared_host_gap_ms
from nfold.explain.design import ExperimentDesign, Trial, over_short_epochs, over_whole_epochs
from nfold.explain.estimate.bootstrap import MetricView

TrialPredicate = Callable[[Trial], bool]
TrialValue = Callable[[Trial], float]
ENDLESS_BATCHES = 10_000_000
"""So many batches are no epoch that anybody waits for: a day of them at 9 ms."""


class EpochBoundaryCause(Cause):
    """What lies between two epochs and in no step, over the steps of one; and what recurs within.

    Of a script with short epochs the ladder's own runs hold some; else whole epochs are run, or
    passes over the data that are cut short: what lies between them is the same. What a script does
    after some steps only is seen in any run.
    """

    id: ClassVar[str] = "epoch-boundary"

    def endless_reason(self, design: ExperimentDesign) -> str | None:
        """That a data set is sampled without an end in sight."""
        batches = (
            design.profile and pytorch.training_loader(design.profile).batches_per_epoch
        ) or 0
        return f"an epoch is {batches:,} batches: none ends" if batches > ENDLESS_BATCHES else None

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        return (design.actual(), design.baseline)

    def refining_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """The same over whole epochs, or where those are long, over short passes; and the run that
        tells what comes after every step.
        """
        own = (*self.whole_epoch_trials(design), *self.short_epoch_trials(design))
        return own if design.profile is None else (*own, idle_trial(design))

    def whole_epoch_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Over whole epochs."""
        return tuple(map(over_whole_epochs, self.trials(design)))

    def short_epoch_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Over passes that are cut short: of a script whose epochs have a length."""
        if (
            design.profile is None
            or not pytorch.training_loader(design.profile).batches_per_epoch
            or self.length_is_fixed(design)
        ):
            return ()
        if self.endless_reason(design) is not None:
            return ()
        return tuple(map(over_short_epochs, self.trials(design)))

    def length_is_fixed(self, design: ExperimentDesign) -> bool:
        """Whether the script's trainer knows an epoch's batches before it: none is cut short."""
        return (
            design.profile is not None and pytorch.training_loader(design.profile).length_read_ahead
        )

    def is_determined(self, design: ExperimentDesign, view: MetricView) -> bool:
        return (
            self.has_epoch_gaps(design, view)
            or self.has_periodic_work(design, view)
            or shared_host_gap_ms(design, view) > 0
        )

    def unknown_part(self, design: ExperimentDesign, view: MetricView) -> str | None:
        full, every = design.actual(), view.period(design.actual())
        if every is not None and not self.has_periodic_work(design, view):
            what = f"{view.periodic_ms(full):.2f} ms of a step come after one step in {every:.0f}"
            return f"{what}, on one device alone nobody knows: "
        if self.is_determined(design, view) and not self.has_epoch_gaps(design, view):
            return "the ends of its epochs: "
        return super().unknown_part(design, view)

    def has_epoch_gaps(self, design: ExperimentDesign, view: MetricView) -> bool:
        """Whether both ends have had an end of an epoch."""
        return all(map(view.has_epoch_gap, self.trials(design)))

    def has_periodic_work(self, design: ExperimentDesign, view: MetricView) -> bool:
        """Whether something is done after some steps only, known at both ends."""
        rungs = self.trials(design)
        some = any(view.period(rung) is not None for rung in rungs)
        return some and all(map(view.has_periodic, rungs))

    def _measured_values(
        self, design: ExperimentDesign, view: MetricView
    ) -> Iterator[tuple[TrialPredicate, TrialValue]]:
        if self.has_epoch_gaps(design, view):
            yield view.has_epoch_gap, view.epoch_gap
        if self.has_periodic_work(design, view):
            yield view.has_periodic, view.periodic_ms

    @cached_per_view
    def ms_per_step(self, design: ExperimentDesign, view: MetricView, trial: Trial) -> float:
        """Milliseconds a step of all that was measured of a rung."""
        return sum(
            number(trial) for has, number in self._measured_values(design, view) if has(trial)
        )

    def saved_ms(self, design: ExperimentDesign, view: MetricView, trial: Trial) -> float:
        """Of a step on N devices, as far as that is known of a rung."""
        full = design.actual()
        told = [number for has, number in self._measured_values(design, view) if has(trial)]
        return sum(number(full) - number(trial) for number in told)

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        return self.ms_per_step(design, view, design.actual()) - self._one_device_ms(design, view)

    def components(self, design: ExperimentDesign, view: MetricView) -> dict[str, float]:
        found: dict[str, float] = {}
        full, one = self.trials(design)
        ends = self.lost_ms(design, view)
        within = 0.0
        if self.has_periodic_work(design, view):
            within = view.periodic_ms(full) - view.periodic_ms(one) / design.work_divisor
            ends -= within
        if (
            self.has_epoch_gaps(design, view)
            and design.profile
            and pytorch.training_loader(design.profile).num_workers
        ):
            first = view.first_batch_wait(full) - view.first_batch_wait(one) / design.work_divisor
            found = {
                "waiting for an epoch's first batch": first,
                "what else lies between epochs": ends - first,
            }
        if self.has_periodic_work(design, view) and self.has_epoch_gaps(design, view):
            found = found or {"between epochs": ends}
            found["after some steps only"] = within
        return found

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        return (design.baseline,)

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        return self._one_device_ms(design, view) + shared_host_gap_ms(design, view)

    def _one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        return self.ms_per_step(design, view, design.baseline) / design.work_divisor

    def one_device_fix(self, design: ExperimentDesign, view: MetricView) -> str:
        usual = shared_host_gap_ms(design, view)
        if design.profile is None or 2 * usual < self.one_device_ms(design, view):
            return self._advice(design, view, design.baseline)
        return pytorch.reduce_host_gap(design, usual)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        return self._advice(design, view, design.actual())

    def _advice(self, design: ExperimentDesign, view: MetricView, trial: Trial) -> str:
        gap = view.epoch_gap(trial) if view.has_epoch_gap(trial) else 0.0
        within = view.periodic_ms(trial) if self.has_periodic_work(design, view) else 0.0
        if design.profile is not None and within > gap:
            every = view.period(trial) or view.period(design.baseline) or 1.0
            return pytorch.reduce_periodic_work(design, every, within * every)
        if design.profile is not None:
            waits = 2 * view.first_batch_wait(trial) > gap
            return pytorch.shorten_epoch_boundary(
                design.profile, waits=waits, ranks=design.gap_locations
            )
        return (
            "keep loader workers alive between epochs (persistent_workers), and evaluate and log "
            "less often"
        )
