"""What every cause can be asked. The base says nothing is lost, at no cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, cast

from nfold.core.stats import Interval
from nfold.core.variant import Variant
from nfold.explain.design import ExperimentDesign, Input, Trial
from nfold.explain.estimate.bootstrap import MetricView

CauseMethod = TypeVar("CauseMethod", bound=Callable[..., Any])
MIN_REMAINING_FRACTION = 1e-3
"""Of a step: less than that no gain leaves."""
INPUT_BOUND_FRACTION = 0.3
"""Of a step of one device: where its input costs as much, other costs may hide behind that."""


def cached_per_view(method: CauseMethod) -> CauseMethod:
    """Of a cause: worked out once for each view, of which its row and other causes ask it often.

    All causes of a kind are the same one.
    """

    @functools.wraps(method)
    def asked(cause: Cause, ladder: ExperimentDesign, view: MetricView, *rungs: Trial) -> Any:
        key = (method, type(cause), id(ladder), *rungs)
        if key not in view.cache:
            # With the ladder, whose identity is no other's as long as it is there.
            view.cache[key] = (method(cause, ladder, view, *rungs), ladder)
        return view.cache[key][0]

    return cast(CauseMethod, asked)


class Cause:
    """One cause of ``nfold.explain.result.budget.CAUSES``: which runs prove it, and what it costs by them.

    Costs are in milliseconds a step. Those on N devices are of the step's difference to N-fold:
    what one device loses in the same way is not in them, but in ``single_ms``.
    """

    id: ClassVar[str]
    removal: ClassVar[Variant] = Variant()
    """What takes the cause away from the real run, for interactions; nothing: nothing can."""
    occupies_device: ClassVar[bool] = False
    """Whether a device is busy with what it costs."""

    @property
    def affects_one_device(self) -> bool:
        """Whether one device alone can lose anything to it."""
        return type(self).one_device_trials is not Cause.one_device_trials

    def skipped_reason(self, design: ExperimentDesign) -> str | None:
        """Why there is no row of it, or None."""
        return (
            NOT_APPLICABLE_TO_OPERATIONS.get(self.id) if design.is_operation else None
        ) or self.not_applicable_reason(design)

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        """Why this plan cannot have the cause or nothing can show it, or None."""
        del design
        return None

    def observed_in_probe(self, design: ExperimentDesign) -> bool:
        """Whether a first look has seen it happen: its runs come first, in case time is short."""
        del design
        return False

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """The runs that ``lost_ms`` compares."""
        del design
        return ()

    def multi_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """``rungs``, where there is more than one device."""
        return self.trials(design) if design.devices > 1 else ()

    def available_trials(self, design: ExperimentDesign, view: MetricView) -> tuple[Trial, ...]:
        """Those of ``on_n`` that tell ``lost_ms``; none while some that it needs have no run."""
        return view.all_or_none(self.multi_device_trials(design))

    def is_resolved(self, design: ExperimentDesign, view: MetricView) -> bool:
        """Whether it is known what N devices lose to it, if they can lose anything."""
        return bool(self.available_trials(design, view)) or not self.multi_device_trials(design)

    def refining_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """More runs, which tell what the fix would gain; without them ``lost_ms`` stands for it."""
        del design
        return ()

    def is_determined(self, design: ExperimentDesign, view: MetricView) -> bool:
        """Whether the runs of ``rungs``, once they are made, tell what ``lost_ms`` needs."""
        del design, view
        return True

    def unknown_part(self, design: ExperimentDesign, view: MetricView) -> str | None:
        """None where all of it is known; else which part is not, nothing for the whole."""
        return None if self.is_determined(design, view) else ""

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """What a step on N devices loses to it."""
        raise NotImplementedError

    def gained_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """What is won at least when it goes; less than it costs, where something else comes."""
        return self.lost_ms(design, view)

    def total_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """All that a step on N devices loses to it: what one device loses in the same way, too."""
        return max(0.0, sum(self.loss_components_ms(design, view)))

    def loss_components_ms(self, design: ExperimentDesign, view: MetricView) -> tuple[float, float]:
        """What N devices lose more than one, or less, and what one does; 0 where nobody knows."""
        single = self.one_device_trials(design)
        more = self.lost_ms(design, view) if self.available_trials(design, view) else 0.0
        alone = self.one_device_ms(design, view) if single and view.has(*single) else 0.0
        return more, alone

    def components(self, design: ExperimentDesign, view: MetricView) -> dict[str, float]:
        """What the cost is made of, where that can be told."""
        del design, view
        return {}

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """The runs that ``single_ms`` compares."""
        del design
        return ()

    def one_device_evidence(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """The runs that tell ``single_ms`` and its part of a step; none without the former."""
        own = self.one_device_trials(design)
        return tuple(dict.fromkeys((*own, design.one_device("real")))) if own else ()

    def direct_estimate(self, design: ExperimentDesign) -> Interval | None:
        """``single_ms`` with its interval, where no rung but the first look tells it."""
        del design
        return None

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """What a step of one device alone loses to it."""
        raise NotImplementedError

    def floor_ms(self, design: ExperimentDesign) -> float:
        """What is known to be left of one device's step when all of ``single_ms`` is gone."""
        del design
        return 0.0

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        """What to change, in words."""
        raise NotImplementedError

    def one_device_fix(self, design: ExperimentDesign, view: MetricView) -> str:
        """What to change for what one device alone loses; ``single_rungs`` were measured."""
        return self.fix(design, view)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        """Plan edits to try on N devices where the cause was found, by the flags that say them.

        Without a flag: a run that changes nothing, but tells more.
        """
        del design
        return {}

    def tried_fixes(self, design: ExperimentDesign, view: MetricView) -> list[Trial]:
        """Those of ``fixes`` that were run."""
        return [rung for rung in self.fixes(design).values() if view.has(rung)]


def remaining_ms(step_ms: float, gained_ms: float, floor_ms: float = 0.0) -> float:
    """Of a step after so much is gained; costs that are uncertain never leave nothing of it."""
    return max(MIN_REMAINING_FRACTION * step_ms, min(floor_ms, step_ms), step_ms - gained_ms)


def exposed_ms(
    design: ExperimentDesign, view: MetricView, cost_ms: Callable[[Input], float], *real: Trial
) -> float:
    """A cost on the ladder without the real input, or with it where that shows less.

    Beside input that is slower, another cost hides and taking it away gains nothing. What the
    real input adds to it is the input's own. ``real`` are the rungs that tell; where there was no
    time for them, no more is gained than what N devices lose at all.
    """
    bare = cost_ms(design.cheapest_input)
    if view.has(*real):
        return min(bare, max(0.0, cost_ms("real")))
    if not view.final or not is_input_bound(design, view):
        return bare
    return min(bare, max(0.0, view.step(design.actual()) - view.step(design.one_device("real"))))


def is_input_bound(design: ExperimentDesign, view: MetricView) -> bool:
    """Whether a good part of one device's step goes to its input."""
    real, bare = design.one_device("real"), design.one_device(design.cheapest_input)
    if design.uses_one_process or not view.has(design.actual(), real, bare):
        return False
    return view.step(real) - view.step(bare) > INPUT_BOUND_FRACTION * view.step(real)


NO_COMMUNICATION = "the devices of an operation exchange nothing"
NOT_APPLICABLE_TO_OPERATIONS: Mapping[str, str] = {
    "epoch-boundary": "an operation has no epochs",
    "imbalance": "the devices of an operation do not wait for each other in a call",
    "input": "what an operation reads is in the host's memory before the first call",
    "link": NO_COMMUNICATION,
    "synchronization": NO_COMMUNICATION,
    "undivided-work": "an operation divides its batch by itself",
}
