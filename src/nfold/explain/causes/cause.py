"""The interface of all causes: which trials show a cause, what it costs, and what removes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, cast

from nfold.core.stats import Interval
from nfold.core.variant import Variant
from nfold.explain.design import ExperimentDesign, Input, Trial
from nfold.explain.estimate.bootstrap import MetricView

CauseMethod = TypeVar("CauseMethod", bound=Callable[..., Any])
MIN_REMAINING_FRACTION = 1e-3  # of a step: no gain leaves less
INPUT_BOUND_FRACTION = 0.3  # of a step of one device: input that costs more may hide other costs


def cached_per_view(method: CauseMethod) -> CauseMethod:
    """Cache a method of a cause per view, design and trials; all objects of a cause are equal."""

    @functools.wraps(method)
    def cached(cause: Cause, design: ExperimentDesign, view: MetricView, *trials: Trial) -> Any:
        key = (method, type(cause), id(design), *trials)
        if key not in view.cache:
            # The value holds the design, so that no other design gets its id.
            view.cache[key] = (method(cause, design, view, *trials), design)
        return view.cache[key][0]

    return cast(CauseMethod, cached)


class Cause:
    """A cause of ``nfold.explain.result.budget.CAUSES``. The base class costs nothing.

    Costs are in milliseconds per step. Those of N devices are part of the difference to N-fold
    speed: what one device loses in the same way is not in ``lost_ms`` but in ``one_device_ms``.
    """

    id: ClassVar[str]
    removal: ClassVar[Variant] = Variant()  # removes it from the real run; empty: impossible
    occupies_device: ClassVar[bool] = False  # whether a device is busy with what it costs

    @property
    def affects_one_device(self) -> bool:
        """Whether one device alone can lose time to it."""
        return type(self).one_device_trials is not Cause.one_device_trials

    def skipped_reason(self, design: ExperimentDesign) -> str | None:
        """Return why the design does not measure the cause, or None."""
        return (
            NOT_APPLICABLE_TO_OPERATIONS.get(self.id) if design.is_operation else None
        ) or self.not_applicable_reason(design)

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        """Return why the plan cannot have the cause or no trial can show it, or None."""
        del design
        return None

    def observed_in_probe(self, design: ExperimentDesign) -> bool:
        """Whether the probe run observed it: its trials then come first."""
        del design
        return False

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Return the trials that ``lost_ms`` compares."""
        del design
        return ()

    def multi_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Return ``trials`` if there are several devices."""
        return self.trials(design) if design.devices > 1 else ()

    def available_trials(self, design: ExperimentDesign, view: MetricView) -> tuple[Trial, ...]:
        """Return the measured trials that determine ``lost_ms``; none if they are too few."""
        return view.all_or_none(self.multi_device_trials(design))

    def is_resolved(self, design: ExperimentDesign, view: MetricView) -> bool:
        """Whether the loss of N devices is known, or impossible."""
        return bool(self.available_trials(design, view)) or not self.multi_device_trials(design)

    def refining_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Return further trials, which show what a fix would gain."""
        del design
        return ()

    def is_determined(self, design: ExperimentDesign, view: MetricView) -> bool:
        """Whether the measured ``trials`` show what ``lost_ms`` needs."""
        del design, view
        return True

    def unknown_part(self, design: ExperimentDesign, view: MetricView) -> str | None:
        """Return which part is unknown: empty for the whole, None if all is known."""
        return None if self.is_determined(design, view) else ""

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """Return what a step on N devices loses to it."""
        raise NotImplementedError

    def gained_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """Return the least gain of removing it: less than ``lost_ms`` if a fix has a cost."""
        return self.lost_ms(design, view)

    def total_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """Return what a step on N devices loses to it, with what one device loses too."""
        return max(0.0, sum(self.loss_components_ms(design, view)))

    def loss_components_ms(self, design: ExperimentDesign, view: MetricView) -> tuple[float, float]:
        """Return the extra loss of N devices and the loss of one; 0 if unknown."""
        single = self.one_device_trials(design)
        more = self.lost_ms(design, view) if self.available_trials(design, view) else 0.0
        one = self.one_device_ms(design, view) if single and view.has(*single) else 0.0
        return more, one

    def components(self, design: ExperimentDesign, view: MetricView) -> dict[str, float]:
        """Return the parts of ``lost_ms`` by name, if they are known."""
        del design, view
        return {}

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Return the trials that ``one_device_ms`` compares."""
        del design
        return ()

    def one_device_evidence(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Return ``one_device_trials`` and the real step of one device; none without the former."""
        own = self.one_device_trials(design)
        return tuple(dict.fromkeys((*own, design.one_device("real")))) if own else ()

    def direct_estimate(self, design: ExperimentDesign) -> Interval | None:
        """Return ``one_device_ms`` with its interval if only the probe run shows it."""
        del design
        return None

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """Return what a step of one device alone loses to it."""
        raise NotImplementedError

    def floor_ms(self, design: ExperimentDesign) -> float:
        """Return a lower bound of the step of one device without the cause."""
        del design
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
        del design
        return {}

    def tried_fixes(self, design: ExperimentDesign, view: MetricView) -> list[Trial]:
        """Return the ``fixes`` that were measured."""
        return [trial for trial in self.fixes(design).values() if view.has(trial)]


def remaining_ms(step_ms: float, gained_ms: float, floor_ms: float = 0.0) -> float:
    """Return a step after a gain: at least ``floor_ms`` and a small fraction of the step."""
    return max(MIN_REMAINING_FRACTION * step_ms, min(floor_ms, step_ms), step_ms - gained_ms)


def exposed_ms(
    design: ExperimentDesign, view: MetricView, cost_ms: Callable[[Input], float], *real: Trial
) -> float:
    """Return the smaller of a cost without and with the real input.

    A cost that hides behind slower input gains nothing when it goes, and what the real input adds
    to it belongs to the input. ``real`` are the trials that ``cost_ms("real")`` compares; without
    them, the cost is at most the whole loss of N devices.
    """
    cheapest = cost_ms(design.cheapest_input)
    if view.has(*real):
        return min(cheapest, max(0.0, cost_ms("real")))
    if not view.final or not is_input_bound(design, view):
        return cheapest
    lost = view.step(design.actual()) - view.step(design.one_device("real"))
    return min(cheapest, max(0.0, lost))


def is_input_bound(design: ExperimentDesign, view: MetricView) -> bool:
    """Whether a large part of the step of one device is its input."""
    real, cheapest = design.one_device("real"), design.one_device(design.cheapest_input)
    if design.uses_one_process or not view.has(design.actual(), real, cheapest):
        return False
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
