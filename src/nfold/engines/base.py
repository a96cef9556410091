"""The seam between nfold and a framework: one verb, run one rank of one plan.

A framework drives devices; it starts no process, opens no store and prints nothing. Everything
that it has to say goes through the observer while it runs and through RankSamples at the end.
Foreign exceptions are translated here into the errors of ``nfold.core.errors`` (OutOfMemory,
Diverged, Collateral, ...); anything else is a crash and keeps its traceback.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, NoReturn

from nfold.core.errors import UnknownValue
from nfold.core.machine import Machine
from nfold.core.measurement import RankSamples
from nfold.core.plan import Plan
from nfold.core.script_profile import ReplayHints, ScriptProfile
from nfold.core.variant import NO_INTERVENTIONS, Variant
from nfold.core.workload import Workload


class Phase(IntEnum):
    """Where a rank is. The supervisor waits longer in phases that may take long in silence."""

    STARTING = 0
    FIRST_STEP = 1
    STEPPING = 2
    EVALUATING = 3
    FINISHED = 4


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything one rank needs to know. ``plan`` is complete.

    ``checkpoint`` is the folder that training is kept in, every ``checkpoint_every`` epochs, and
    gone on from; None: it is not. ``repeat`` tells the simulated framework which noise to draw.
    ``turns`` leave out more than ``ablation`` does, one after the other, again and again.
    ``learnt`` is what a first look at a script tells.
    """

    workload: Workload
    plan: Plan
    machine: Machine
    requested_variant: Variant | None = None
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    checkpoint: str | None = None
    checkpoint_every: int = 1
    repeat: int = 0
    interleaved_variants: tuple[Variant, ...] = ()
    replay_hints: ReplayHints = field(default_factory=ReplayHints)

    @property
    def variant(self) -> Variant:
        """What an experiment takes away; usually nothing."""
        return self.requested_variant or NO_INTERVENTIONS


class Observer:
    """What a rank reports to while it runs. This base does nothing, at no cost."""

    def beat(self, phase: Phase, step: int, total: int = 0) -> None:
        """Say that the rank lives: its phase, steps done, steps planned (0: not known)."""

    def save(self, samples: RankSamples, *, epoch_ended: bool = False) -> None:
        """Keep what is measured so far, so that it survives this process."""

    def save_profile(self, profile: ScriptProfile) -> None:
        """Keep what was seen of a script."""

    def wait_for_other_ranks(self, step: int) -> None:
        """Wait, not for ever, until every other rank has made so many steps or has ended."""

    def wait_for_idle_children(self) -> None:
        """Wait, not for ever, until the processes that this one has started leave the cores alone.

        Batches that are given again need no workers, but those go on until their queues are full.
        """

    def exit_process(self, samples: RankSamples) -> NoReturn:
        """Keep the samples and end this process now, whatever still runs in it."""
        raise SystemExit(0)


class Framework(ABC):
    """One framework. Importing its class imports no heavy library; ``run_rank`` does."""

    name: ClassVar[str]
    runs_in_parent: ClassVar[bool] = False
    """Whether every rank runs in the parent's own process (the simulated framework)."""
    supports_checkpoints: ClassVar[bool] = True
    """Whether ``nfold train`` can keep a training in checkpoints, and go on from one."""

    @abstractmethod
    def unsupported_reason(self, workload: Workload, plan: Plan, machine: Machine) -> str | None:
        """Why this framework cannot run the complete plan, or None where it can."""

    def refusal_reason(self, variant: Variant, workload: Workload, plan: Plan) -> str | None:
        """Why the ablation cannot be applied to the complete plan, or None where it can."""
        del workload, plan
        return f"framework {self.name!r} applies no ablations" if variant else None

    def switchable_fields(self, workload: Workload, plan: Plan) -> tuple[str, ...]:
        """The fields of an Ablation that can change between two steps of the complete plan.

        Experiments that differ in nothing else take turns in one run; here none do.
        """
        del workload, plan
        return ()

    @abstractmethod
    def process_count(self, plan: Plan) -> int:
        """How many processes drive the plan's devices."""

    @abstractmethod
    def run_rank(self, task: Task, observer: Observer) -> RankSamples:
        """Run one rank to its end and return what it measured."""


FRAMEWORK_CLASSES: dict[str, str] = {
    "simulated": "nfold.engines.simulated:Simulated",
    "torch": "nfold.engines.torch.framework:TorchFramework",
    "tensorflow": "nfold.engines.keras.framework:TensorFlow",
    "jax": "nfold.engines.keras.framework:Jax",
    "keras-torch": "nfold.engines.keras.framework:KerasTorch",
}


def get_framework(name: str) -> Framework:
    """The framework called ``name``; UnknownValue lists the known ones."""
    if name not in FRAMEWORK_CLASSES:
        raise UnknownValue("framework", name, FRAMEWORK_CLASSES)
    module, _, attribute = FRAMEWORK_CLASSES[name].partition(":")
    made = getattr(importlib.import_module(module), attribute)()
    assert isinstance(made, Framework)
    return made
