"""The interface between nfold and a framework: run one rank of one plan.

A framework drives devices. It starts no process, opens no store and prints nothing: it reports to
the observer while it runs, and returns RankSamples. It translates foreign exceptions into the
errors of ``nfold.core.errors`` (OutOfMemory, Diverged, Collateral, ...); any other exception is a
crash and keeps its traceback.
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
    """The phase of a rank. The supervisor allows more time without progress in long phases."""

    STARTING = 0
    FIRST_STEP = 1
    STEPPING = 2
    EVALUATING = 3
    FINISHED = 4


@dataclass(frozen=True, kw_only=True)
class Task:
    """The input of one rank. ``plan`` is complete.

    Attributes:
        requested_variant: The interventions of the experiment; None for none.
        checkpoint: The folder to save checkpoints to and to resume from, or None.
        checkpoint_every: Epochs between two checkpoints.
        repeat: Selects the noise of the simulated framework.
        interleaved_variants: Variants that alternate within the run, in slots.
        replay_hints: What the probe run found out about a script.
        edited_sources: Files of a script, and edited copies that are run in their place.
        alternates: The run alternates with another one, in slices.
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
    edited_sources: tuple[tuple[str, str], ...] = ()
    alternates: bool = False

    @property
    def variant(self) -> Variant:
        return self.requested_variant or NO_INTERVENTIONS


class Observer:
    """Receives the progress and the samples of a rank. This base class ignores them."""

    def beat(self, phase: Phase, step: int, total: int = 0) -> None:
        """Report the phase, the steps done, and the steps planned (0: unknown)."""

    def save(self, samples: RankSamples, *, epoch_ended: bool = False) -> None:
        """Store the samples so far, so that they survive this process."""

    def save_profile(self, profile: ScriptProfile) -> None: ...

    def wait_for_other_ranks(self, step: int) -> None:
        """Wait, with a limit, until every other rank has made ``step`` steps or has ended."""

    def wait_for_slice(self, number: int) -> None:
        """Wait until this run may make slice ``number``; it alternates with another run.

        Slice 0 is the warm-up.
        """

    def wait_for_idle_children(self) -> None:
        """Wait, with a limit, until the child processes of this process use no CPU.

        Replayed batches need no loader workers, but workers continue until their queues are full.
        """

    def exit_process(self, samples: RankSamples) -> NoReturn:
        """Store the samples and end this process at once, including its threads."""
        raise SystemExit(0)


class Framework(ABC):
    """A framework. Importing its class imports no heavy library; ``run_rank`` does."""

    name: ClassVar[str]
    # every rank runs in the parent process (simulated framework)
    runs_in_parent: ClassVar[bool] = False
    supports_checkpoints: ClassVar[bool] = True  # ``nfold train`` can save and resume

    @abstractmethod
    def unsupported_reason(self, workload: Workload, plan: Plan, machine: Machine) -> str | None:
        """Return why this framework cannot run the complete plan, or None."""

    def refusal_reason(self, variant: Variant, workload: Workload, plan: Plan) -> str | None:
        """Return why the variant cannot be applied to the complete plan, or None."""
        del workload, plan
        return f"framework {self.name!r} supports no interventions" if variant else None

    def switchable_fields(self, workload: Workload, plan: Plan) -> tuple[str, ...]:
        """Return the fields of a Variant that can change between two steps of the complete plan.

        Variants that differ only in these fields are interleaved in one run.
        """
        del workload, plan
        return ()

    @abstractmethod
    def process_count(self, plan: Plan) -> int: ...

    @abstractmethod
    def run_rank(self, task: Task, observer: Observer) -> RankSamples: ...


FRAMEWORK_CLASSES: dict[str, str] = {
    "simulated": "nfold.engines.simulated:Simulated",
    "torch": "nfold.engines.torch.framework:TorchFramework",
    "tensorflow": "nfold.engines.keras.framework:TensorFlow",
    "jax": "nfold.engines.keras.framework:Jax",
    "keras-torch": "nfold.engines.keras.framework:KerasTorch",
}


def get_framework(name: str) -> Framework:
    """Return the framework ``name``. Raises UnknownValue, which lists the known ones."""
    if name not in FRAMEWORK_CLASSES:
        raise UnknownValue("framework", name, FRAMEWORK_CLASSES)
    module, _, attribute = FRAMEWORK_CLASSES[name].partition(":")
    framework = getattr(importlib.import_module(module), attribute)()
    assert isinstance(framework, Framework)
    return framework
