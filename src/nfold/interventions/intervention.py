"""The base class of interventions: all that nfold knows about one of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, get_args, get_origin, overload

from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.core.source_edit import SetVariable, SourceEdit
from nfold.interventions.script_edits import set_wrapper_arguments

T = TypeVar("T")
Numerics = Literal["same", "rounding", "training"]
NUMERICS: tuple[Numerics, ...] = get_args(Numerics)
"""How a remedy may change the numbers of a training, from not at all to another training."""


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """The facts about a workload that decide whether an intervention applies to it.

    An operation is one timed computation without gradients and model. ``is_function``: the user's
    own workload.
    """

    name: str
    is_script: bool = False
    is_operation: bool = False
    is_function: bool = False
    augments: bool = False


class Intervention(Generic[T]):
    """One thing that an experiment changes, and one attribute of a Variant.

    The type parameter is the type of its values. A value that is not the default is applied in a
    script and in a built-in workload by the first of these that is defined: ``environment``,
    ``ddp_arguments``, ``loader_arguments``, ``edit_plan``, ``TorchSetting``; otherwise by the
    modules in ``applied_in``.

    Attributes:
        name: attribute of Variant; the registry sets it.
        default: value without the intervention.
        stored_name: name in stored JSON; by default ``name``.
        labels: how results call a value.
        kind: a ``remedy`` can be kept by the user, an ``experiment`` only measures.
        permission: what a user must allow before ``nfold tune`` tries it; empty: nothing.
        numerics: a training with the remedy has the ``same`` numbers, differs by ``rounding``, or is
            another ``training``. None for an experiment.
        is_observation: it measures more, and changes no step.
        switchable: it can change between two steps of a running script.
        changes_communication: a captured step with another value is captured anew.
        applies_to_operations: it can be applied to a workload without gradients and model.
        by_hand: what a user does where no edit of the source keeps a remedy.
        refused_in_scripts, refused_in_workloads: reason why PyTorch never applies it there.
        refused_in_runs: reason why ``nfold run --with`` never applies it to a script.
        needed_in_run: what a script has that the remedy changes; empty: it is always applied.
        applied_in: source files that apply it, if it is not applied generically.
    """

    name: str
    default: T
    stored_name: str = ""
    labels: ClassVar[Mapping[Any, str]] = {}
    kind: ClassVar[Literal["experiment", "remedy"]] = "experiment"
    numerics: ClassVar[Numerics | None] = None
    permission: ClassVar[str] = ""
    by_hand: ClassVar[str] = "nfold knows no line to change"
    is_observation: ClassVar[bool] = False
    switchable: ClassVar[bool] = False
    changes_communication: ClassVar[bool] = False
    applies_to_operations: ClassVar[bool] = False
    refused_in_scripts: ClassVar[str] = ""
    refused_in_workloads: ClassVar[str] = ""
    refused_in_runs: ClassVar[str] = ""
    needed_in_run: ClassVar[str] = ""
    applied_in: ClassVar[tuple[str, ...]] = ()
    value_type: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        (cls.value_type,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.stored_name = self.stored_name or name

    @overload
    def __get__(self, variant: None, owner: type) -> Self: ...
    @overload
    def __get__(self, variant: object, owner: type) -> T: ...
    def __get__(self, variant: object | None, owner: type) -> Self | T:
        # A variant stores values other than the default in its __dict__, which is looked up first.
        return self if variant is None else self.default

    def check(self, value: T) -> None:
        """Raise UsageError if ``value`` is never allowed."""
        choices = get_args(self.value_type)
        if get_origin(self.value_type) is Literal and value not in choices:
            allowed = ", ".join(map(str, choices))
            raise UsageError(f"{self.name} {value!r}: allowed are {allowed}")

    def label(self, value: T) -> str:
        """Return how results call ``value``."""
        return self.labels.get(value) or f"{self.name.replace('_', ' ')} {value}"

    def refusal(self, value: T, plan: Plan) -> str | None:
        """Return why no framework can apply ``value`` to the complete plan, or None."""
        del value, plan
        return None

    def conflict(self, value: T, interventions: Mapping[str, object]) -> str | None:
        """Return why ``value`` cannot be combined with the other interventions, or None."""
        del value, interventions
        return None

    def torch_refusal(self, value: T, plan: Plan, workload: WorkloadFacts) -> str | None:
        """Return why PyTorch cannot apply ``value`` to the plan of a workload or script, or None."""
        del value, plan
        return (
            self.refused_in_scripts if workload.is_script else self.refused_in_workloads
        ) or None

    def switchable_in_workload(self, plan: Plan) -> bool:
        """Return whether it can change between two steps of a running built-in workload."""
        del plan
        return False

    def is_useful(self, profile: Any) -> bool:
        """Return whether a script with this ScriptProfile has anything that it would change."""
        del profile
        return True

    def values_to_try(self, profile: Any, plan: Plan, cores: int) -> tuple[T, ...]:
        """Return the values of a remedy to try on a script with this ScriptProfile, likely ones first.

        ``cores`` are those of the host. By default, a switch is turned.
        """
        del profile, plan, cores
        return (not self.default,) if isinstance(self.default, bool) else ()  # type: ignore[return-value]

    def environment(self, value: T, environment: Mapping[str, str]) -> dict[str, str]:
        """Return variables to add to the ``environment`` in which ranks start."""
        del value, environment
        return {}

    def ddp_arguments(self, value: T) -> dict[str, Any]:
        """Return arguments to replace in the constructor of DistributedDataParallel."""
        del value
        return {}

    def loader_arguments(self, value: T) -> dict[str, Any]:
        """Return arguments to replace in the DataLoaders that feed the training of a script."""
        del value
        return {}

    def edit_plan(self, value: T, plan: Plan) -> Plan:
        """Return the plan that a rank of a built-in workload trains by."""
        del value
        return plan

    def source_edits(self, value: T, profile: Any) -> tuple[SourceEdit, ...] | None:
        """Return the changes of the script with this ScriptProfile that keep the remedy.

        None: nfold does not know the place, or the script has no such place. By default, the edits
        set the variables of ``environment`` or the arguments of ``ddp_arguments``.
        """
        if self.kind != "remedy":
            return None
        variables = self.environment(value, os.environ)
        if variables:
            return tuple(SetVariable(name=name, value=text) for name, text in variables.items())
        arguments = self.ddp_arguments(value)
        return set_wrapper_arguments(profile, arguments) if arguments else None

    def simulated_ms(self, value: T, scenario: Any, devices: int) -> float:
        """Return its milliseconds in each step of a simulated Scenario on ``devices`` devices.

        ``Scenario.intervention_ms`` has costs by name, which a value other than the default removes.
        """
        del devices
        return float(scenario.intervention_ms.get(self.name, 0.0)) if value == self.default else 0.0


class TorchSetting(Intervention[T]):
    """An intervention that changes a global setting of PyTorch.

    ``read`` and ``write`` take the module ``torch``, so that importing an intervention does not
    import it.
    """

    def setting(self, value: T) -> Any:
        """Return the setting for a value of the intervention."""
        return value

    def read(self, torch: Any) -> Any:
        raise NotImplementedError

    def write(self, torch: Any, setting: Any) -> None:
        raise NotImplementedError
