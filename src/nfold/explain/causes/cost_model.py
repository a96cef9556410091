"""Cost of a cause in one experiment, from contrasts between trials."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nfold.core.stats import Interval
from nfold.explain.design import (
    ExperimentDesign,
    Input,
    Trial,
    no_allreduce,
    with_expandable_segments,
)
from nfold.explain.estimate.bootstrap import MetricView, Statistic
from nfold.explain.estimate.samples import Samples

SLOWER_HOST_FACTOR = 1.1  # between two runs; they usually differ by less
INPUT_BOUND_FRACTION = 0.3  # of a step of one device: input that costs more may hide other costs


def zero(view: MetricView, trial: Trial) -> Samples:
    """Return no time: a base metric if the metric alone is the cost."""
    return 0.0


@dataclass(frozen=True)
class Contrast:
    """The cost of ``trial`` beyond ``base``, in milliseconds per step.

    ``metric`` and ``base_metric`` are the steps that count. ``less`` is a part that belongs to
    another cause or to one device. ``real`` is the same contrast with the real input. ``name`` is
    that of a component of the cost. The trial without the cause is measured first if
    ``base_first``. ``estimate`` is the cost if only the probe run shows it.
    """

    trial: Trial
    base: Trial
    name: str = ""
    metric: Callable[[MetricView, Trial], Samples] = MetricView.step
    base_metric: Callable[[MetricView, Trial], Samples] = MetricView.step
    less: Contrast | None = None
    real: Contrast | None = None
    base_first: bool = False
    estimate: Interval | None = None

    @property
    def trials(self) -> tuple[Trial, ...]:
        own = (self.base, self.trial) if self.base_first else (self.trial, self.base)
        return own if self.less is None else (*own, *self.less.trials)

    def cost_ms(self, view: MetricView) -> Samples:
        """Return the cost with the input of the trials."""
        if self.estimate is not None:
            return self.estimate.value
        cost = self.metric(view, self.trial) - self.base_metric(view, self.base)
        return cost if self.less is None else cost - self.less.cost_ms(view)

    def exposed_ms(self, design: ExperimentDesign, view: MetricView) -> Samples:
        """Return the smaller of the costs without and with the real input.

        A cost that hides behind slower input gains nothing when it goes, and what the real input
        adds to it belongs to the input. Before the trials with the real input are measured, the
        cost is at most the whole loss of N devices.
        """
        cost = self.cost_ms(view)
        if self.real is None:
            return cost
        if view.has(*self.real.trials):
            return np.minimum(cost, np.maximum(0.0, self.real.cost_ms(view)))
        if not view.final or not has_input(design, view):
            return cost
        lost = view.step(design.actual()) - view.step(design.one_device("real"))
        exposed = np.minimum(cost, np.maximum(0.0, lost))
        return np.where(is_input_bound(design, view), exposed, cost)


def with_both_inputs(design: ExperimentDesign, contrast: Callable[[Input], Contrast]) -> Contrast:
    """Return a contrast with the cheapest input, and as its ``real`` that with the real input."""
    return replace(contrast(design.cheapest_input), real=contrast("real"))


def replica_step(design: ExperimentDesign, input_: Input) -> Callable[[MetricView, Trial], Samples]:
    """Return the metric of independent ranks: their step, or that of ranks without exchange.

    The latter do the same work, and more. If independent ranks took much longer, the host was slower
    while they ran.
    """
    none = no_allreduce(design, input_)

    def step(view: MetricView, alone: Trial) -> Samples:
        independent = view.reference_step(alone)
        if none == alone or not view.has(none):
            return independent
        without_exchange = view.reference_step(none)
        slower = independent > SLOWER_HOST_FACTOR * without_exchange
        return np.where(slower, without_exchange, independent)

    return step


def without_retries(design: ExperimentDesign, trial: Trial, base: Trial) -> Contrast:
    """Return the contrast of two trials without allocator retries, which may hide a cost."""
    return Contrast(with_expandable_segments(design, trial), with_expandable_segments(design, base))


@dataclass(frozen=True, eq=False)
class CostModel:
    """The trials of a cause in one experiment, and what it costs: the sum of its contrasts.

    Costs are in milliseconds per step. Those of N devices are part of the difference to N-fold
    speed: what one device loses in the same way is not in ``lost_ms`` but in ``one_device_ms``.
    Subclasses are for costs that no contrast shows.
    """

    design: ExperimentDesign
    contrasts: tuple[Contrast, ...] = ()
    one_device_contrasts: tuple[Contrast, ...] = ()
    same_loss: bool = False  # N devices and one lose the same time

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The trials that ``lost_ms`` compares; none on one device."""
        return _trials_of(self.contrasts) if self.design.devices > 1 else ()

    @property
    def one_device_trials(self) -> tuple[Trial, ...]:
        """The trials that ``one_device_ms`` compares."""
        return _trials_of(self.one_device_contrasts)

    @property
    def refining_trials(self) -> tuple[Trial, ...]:
        """Further trials, which show more of the cost, or what a fix would gain."""
        return ()

    def evidence(self, view: MetricView) -> tuple[Trial, ...]:
        """Return the measured trials that determine ``lost_ms``; none if they are too few."""
        if self.trials and self.contrasts:
            return _trials_of(self._measured_contrasts(view))
        return self.trials if view.has(*self.trials) else ()

    def is_determined(self, view: MetricView) -> bool:
        """Return whether the measured trials show what ``lost_ms`` and ``one_device_ms`` need."""
        return True

    def components(self, view: MetricView) -> dict[str, Samples]:
        """Return the parts of ``lost_ms`` by name, if they are known."""
        named = (one for one in self._measured_contrasts(view) if one.name)
        return {one.name: one.exposed_ms(self.design, view) for one in named}

    def lost_ms(self, view: MetricView) -> Samples:
        """Return what a step on N devices loses."""
        return sum(one.exposed_ms(self.design, view) for one in self._measured_contrasts(view))

    def gained_ms(self, view: MetricView) -> Samples:
        """Return the least gain of removing the cause: less than ``lost_ms`` if a fix has a cost."""
        return self.lost_ms(view)

    def total_ms(self, view: MetricView) -> Samples:
        """Return what a step on N devices loses, with what one device loses too."""
        single = self.one_device_trials
        one_ms = self.one_device_ms(view) if single and view.has(*single) else 0.0
        both = self.lost_ms(view) if self.evidence(view) else 0.0, one_ms
        return np.maximum(0.0, np.maximum(*both) if self.same_loss else sum(both))

    def one_device_ms(self, view: MetricView) -> Samples:
        """Return what a step of one device alone loses."""
        return sum(one.cost_ms(view) for one in self.one_device_contrasts)

    def direct_estimate(self) -> Interval | None:
        """Return ``one_device_ms`` with its interval if only the probe run shows it."""
        estimates = (one.estimate for one in self.one_device_contrasts)
        return next(filter(None, estimates), None)

    def floor_ms(self) -> float:
        """Return a lower bound of the step of one device without the cause."""
        return 0.0

    def _measured_contrasts(self, view: MetricView) -> list[Contrast]:
        return [one for one in self.contrasts if view.has(*one.trials)]


def one_device_trials_and_step(costs: CostModel) -> tuple[Trial, ...]:
    """Return ``one_device_trials`` and the real step of one device; none without the former."""
    own = costs.one_device_trials
    return tuple(dict.fromkeys((*own, costs.design.one_device("real")))) if own else ()


def component(costs: CostModel, name: str) -> Statistic:
    """Return a part of what N devices lose."""
    return lambda view: costs.components(view)[name]


def has_input(design: ExperimentDesign, view: MetricView) -> bool:
    """Return whether the input of one device was measured, with real and cheapest input."""
    one = design.one_device
    measured = view.has(design.actual(), one("real"), one(design.cheapest_input))
    return measured and not design.uses_one_process


def is_input_bound(design: ExperimentDesign, view: MetricView) -> NDArray[np.bool_] | bool:
    """Return whether a large part of the step of one device is its input, if that was measured."""
    real, cheapest = design.one_device("real"), design.one_device(design.cheapest_input)
    return view.step(real) - view.step(cheapest) > INPUT_BOUND_FRACTION * view.step(real)


def _trials_of(contrasts: Iterable[Contrast]) -> tuple[Trial, ...]:
    return tuple(dict.fromkeys(trial for contrast in contrasts for trial in contrast.trials))
