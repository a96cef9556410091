"""The interface of all causes: the contrasts that show a cause, what removes it, and advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from nfold.core.variant import NO_INTERVENTIONS, Variant
from nfold.explain.causes.cost_model import Contrast, CostModel
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import MetricView

ONE_PROCESS = "one process drives all devices"


@dataclass(frozen=True, eq=False)
class Cause:
    """A reason why N devices or one lose time. The base class costs nothing.

    Most causes are ``contrasts``, ``one_device_contrasts``, ``fixes`` and advice: trials and costs
    follow from them. Other causes have a ``model`` of their own.

    Attributes:
        model: the class of its costs.
        removal: the interventions that remove it from the real run; empty if that is impossible.
        affects_one_device: one device alone can lose time to it.
        occupies_device: a device is busy with what it costs.
        same_loss: N devices and one lose the same time to it.
        advice_in_words: its fix is more than a setting.
    """

    id: str
    _: KW_ONLY
    model: type[CostModel] = CostModel
    removal: Variant = NO_INTERVENTIONS
    affects_one_device: bool = True
    occupies_device: bool = False
    same_loss: bool = False
    advice_in_words: bool = False

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

    def costs(self, design: ExperimentDesign) -> CostModel:
        """Return its trials and costs in an experiment."""
        single = self.one_device_contrasts(design)
        return self.model(design, self.contrasts(design), single, self.same_loss)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        """Return the fixes to measure on N devices, by flag or advice.

        A trial under the empty flag changes nothing, but shows more about the cause.
        """
        return {}

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        """Return what to change."""
        raise NotImplementedError

    def has_repair(self, design: ExperimentDesign) -> bool:
        """Return whether its advice may remove its whole cost at the same batch size."""
        return False

    def one_device_fix(self, design: ExperimentDesign, view: MetricView) -> str:
        """Return what to change for one device, after its trials were measured."""
        return self.fix(design, view)


def skipped_reason(cause: Cause, design: ExperimentDesign) -> str | None:
    """Return why the design does not measure a cause, or None."""
    operation = NOT_APPLICABLE_TO_OPERATIONS.get(cause.id) if design.is_operation else None
    return operation or cause.not_applicable_reason(design)


NO_COMMUNICATION = "the devices of an operation do not communicate"
NOT_APPLICABLE_TO_OPERATIONS: Mapping[str, str] = {
    "epoch-boundary": "an operation has no epochs",
    "imbalance": "the devices of an operation do not wait for each other in a call",
    "input": "an operation reads its input into host memory before the first call",
    "link": NO_COMMUNICATION,
    "synchronization": NO_COMMUNICATION,
    "undivided-work": "an operation divides its batch itself",
}
