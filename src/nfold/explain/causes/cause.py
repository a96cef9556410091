"""The interface of all causes: the contrasts that show a cause, what it costs, what removes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from nfold.core.stats import Interval
from nfold.core.variant import Variant
from nfold.explain.design import ExperimentDesign, Input, Trial
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.estimate.samples import Samples

MIN_REMAINING_FRACTION = 1e-3  # of a step: no gain leaves less
INPUT_BOUND_FRACTION = 0.3  # of a step of one device: input that costs more may hide other costs
ONE_PROCESS = "one process drives all devices"


@dataclass(frozen=True)
class Contrast:
    """The cost of ``trial`` beyond ``base``, in milliseconds per step.

    ``metric`` and ``base_metric`` are the steps that count. ``less`` is a part that belongs to
    another cause or to one device. ``real`` is the same contrast with the real input. ``name`` is
    that of a component of the cost. The trial without the cause is measured first if
    ``base_first``.
    """

    trial: Trial
    base: Trial
    name: str = ""
    metric: Callable[[MetricView, Trial], Samples] = MetricView.step
    base_metric: Callable[[MetricView, Trial], Samples] = MetricView.step
    less: Contrast | None = None
    real: Contrast | None = None
    base_first: bool = False

    @property
    def trials(self) -> tuple[Trial, ...]:
        own = (self.base, self.trial) if self.base_first else (self.trial, self.base)
        return own if self.less is None else (*own, *self.less.trials)

    def cost_ms(self, view: MetricView) -> Samples:
        """Return the cost with the input of the trials."""
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


def without_retries(design: ExperimentDesign, trial: Trial, base: Trial) -> Contrast:
    """Return the contrast of two trials without allocator retries, which may hide a cost."""
    return Contrast(design.with_expandable_segments(trial), design.with_expandable_segments(base))


def _trials_of(contrasts: Iterable[Contrast]) -> tuple[Trial, ...]:
    return tuple(dict.fromkeys(trial for contrast in contrasts for trial in contrast.trials))


class Cause:
    """A reason why N devices or one lose time. The base class costs nothing.

    Most causes are ``contrasts``, ``one_device_contrasts``, remedies and advice; trials and costs
    follow from them. Other causes override ``trials`` and ``lost_ms`` too. Costs are in milliseconds
    per step. Those of N devices are part of the difference to N-fold speed: what one device loses
    in the same way is not in ``lost_ms`` but in ``one_device_ms``.
    """

    id: ClassVar[str]
    removal: ClassVar[Variant] = Variant()  # removes it from the real run; empty: impossible
    affects_one_device: ClassVar[bool] = True  # whether one device alone can lose time to it
    occupies_device: ClassVar[bool] = False  # whether a device is busy with what it costs
    same_loss: ClassVar[bool] = False  # whether N devices and one lose the same time to it
    advice_in_words: ClassVar[bool] = False  # whether its fix is more than a setting
    component_rows: ClassVar[Mapping[str, str]] = {}  # components that belong to another row

    def skipped_reason(self, design: ExperimentDesign) -> str | None:
        """Return why the design does not measure the cause, or None."""
        return (
            NOT_APPLICABLE_TO_OPERATIONS.get(self.id) if design.is_operation else None
        ) or self.not_applicable_reason(design)

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        """Return why the plan cannot have the cause or no trial can show it, or None."""
        return None

    def observed_in_probe(self, design: ExperimentDesign) -> bool:
        """Return whether the probe run observed it: its trials then come first."""
        return False

    def contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        """Return the contrasts whose sum N devices lose."""
        return ()

    def one_device_contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        """Return the contrasts whose sum one device loses by itself."""
        return ()

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Return the trials that ``lost_ms`` compares."""
        return _trials_of(self.contrasts(design))

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Return the trials that ``one_device_ms`` compares."""
        return _trials_of(self.one_device_contrasts(design))

    def refining_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Return further trials, which show what a fix would gain."""
        return ()

    def multi_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Return ``trials`` if there are several devices."""
        return self.trials(design) if design.devices > 1 else ()

    def one_device_evidence(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Return ``one_device_trials`` and the real step of one device; none without the former."""
        own = self.one_device_trials(design)
        return tuple(dict.fromkeys((*own, design.one_device("real")))) if own else ()

    def available_trials(self, design: ExperimentDesign, view: MetricView) -> tuple[Trial, ...]:
        """Return the measured trials that determine ``lost_ms``; none if they are too few."""
        trials, contrasts = self.multi_device_trials(design), self.contrasts(design)
        if not contrasts:
            return trials if view.has(*trials) else ()
        return _trials_of(c for c in contrasts if trials and view.has(*c.trials))

    def is_resolved(self, design: ExperimentDesign, view: MetricView) -> bool:
        """Return whether the loss of N devices is known, or impossible."""
        return bool(self.available_trials(design, view)) or not self.multi_device_trials(design)

    def is_determined(self, design: ExperimentDesign, view: MetricView) -> bool:
        """Return whether the measured ``trials`` show what ``lost_ms`` needs."""
        return True

    def unknown_part(self, design: ExperimentDesign, view: MetricView) -> str | None:
        """Return which part is unknown: empty for the whole, None if all is known."""
        return None if self.is_determined(design, view) else ""

    def endless_reason(self, design: ExperimentDesign) -> str | None:
        """Return why no trial can ever show the unknown part, or None."""
        return None

    def contrast_costs(self, design: ExperimentDesign, view: MetricView) -> dict[str, Samples]:
        """Return the costs of the measured ``contrasts`` by their names."""
        known = (one for one in self.contrasts(design) if view.has(*one.trials))
        return {one.name: one.exposed_ms(design, view) for one in known}

    def components(self, design: ExperimentDesign, view: MetricView) -> dict[str, Samples]:
        """Return the parts of ``lost_ms`` by name, if they are known."""
        return {name: ms for name, ms in self.contrast_costs(design, view).items() if name}

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> Samples:
        """Return what a step on N devices loses to it."""
        return sum(self.contrast_costs(design, view).values())

    def gained_ms(self, design: ExperimentDesign, view: MetricView) -> Samples:
        """Return the least gain of removing it: less than ``lost_ms`` if a fix has a cost."""
        return self.lost_ms(design, view)

    def known_ms(self, design: ExperimentDesign, view: MetricView) -> Samples:
        """Return ``lost_ms`` if it is known, else 0."""
        return self.lost_ms(design, view) if self.available_trials(design, view) else 0.0

    def total_ms(self, design: ExperimentDesign, view: MetricView) -> Samples:
        """Return what a step on N devices loses to it, with what one device loses too."""
        single = self.one_device_trials(design)
        one = self.one_device_ms(design, view) if single and view.has(*single) else 0.0
        both = self.known_ms(design, view), one
        return np.maximum(0.0, np.maximum(*both) if self.same_loss else sum(both))

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> Samples:
        """Return what a step of one device alone loses to it."""
        return sum(one.cost_ms(view) for one in self.one_device_contrasts(design))

    def direct_estimate(self, design: ExperimentDesign) -> Interval | None:
        """Return ``one_device_ms`` with its interval if only the probe run shows it."""
        return None

    def floor_ms(self, design: ExperimentDesign) -> float:
        """Return a lower bound of the step of one device without the cause."""
        return 0.0

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        """Return what to change."""
        raise NotImplementedError

    def one_device_fix(self, design: ExperimentDesign, view: MetricView) -> str:
        """Return what to change for one device, after its trials were measured."""
        return self.fix(design, view)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        """Return the fixes to measure on N devices, by flag or advice.

        A trial under the empty flag changes nothing, but shows more about the cause.
        """
        return {}

    def tried_fixes(self, design: ExperimentDesign, view: MetricView) -> list[Trial]:
        """Return the ``fixes`` that were measured."""
        return [trial for trial in self.fixes(design).values() if view.has(trial)]


def remaining_ms(step_ms: Samples, gained_ms: Samples, floor_ms: Samples = 0.0) -> Samples:
    """Return a step after a gain: at least ``floor_ms`` and a small fraction of the step."""
    least = np.maximum(MIN_REMAINING_FRACTION * step_ms, np.minimum(floor_ms, step_ms))
    return np.maximum(least, step_ms - gained_ms)


def has_input(design: ExperimentDesign, view: MetricView) -> bool:
    """Return whether the input of one device was measured, with real and cheapest input."""
    one = design.one_device
    measured = view.has(design.actual(), one("real"), one(design.cheapest_input))
    return measured and not design.uses_one_process


def is_input_bound(design: ExperimentDesign, view: MetricView) -> NDArray[np.bool_] | bool:
    """Return whether a large part of the step of one device is its input, if that was measured."""
    real, cheapest = design.one_device("real"), design.one_device(design.cheapest_input)
    return view.step(real) - view.step(cheapest) > INPUT_BOUND_FRACTION * view.step(real)


NO_COMMUNICATION = "the devices of an operation do not communicate"
NOT_APPLICABLE_TO_OPERATIONS: Mapping[str, str] = {
    "epoch-boundary": "an operation has no epochs",
    "imbalance": "the devices of an operation do not wait for each other in a call",
    "input": "an operation reads its input into host memory before the first call",
    "link": NO_COMMUNICATION,
    "synchronization": NO_COMMUNICATION,
    "undivided-work": "an operation divides its batch itself",
}
