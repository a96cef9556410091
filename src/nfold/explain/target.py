"""The seam between the method and what is explained: run a rung, give back its measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nfold import turns
from nfold.ablation import Variant
from nfold.explain.readings import ranks_with_windows
from nfold.explain.rung import Trial
from nfold.machine import Machine
from nfold.measurement import Measurement, cell_id
from nfold.plan import Plan
from nfold.records import MeasurementStore
from nfold.run.options import RunOptions
from nfold.run.turned import split_by_variant
from nfold.seen import ScriptProfile
from nfold.workload import Workload

RefusalRule = Callable[[Workload, Plan, Variant], str | None]
"""Why a plan or its ablation cannot be run, or None: what the plan's framework says."""
SwitchableFields = Callable[[Workload, Plan], tuple[str, ...]]
"""The fields of an Ablation that can change between two steps: what the plan's framework says."""


class RunFunction(Protocol):
    """The one verb, ``nfold.run.run.run``."""

    def __call__(
        self,
        workload: Workload,
        plan: Plan,
        variant: Variant | None = None,
        *,
        machine: Machine,
        options: RunOptions,
        repeat: int,
        interleaved_variants: tuple[Variant, ...] = (),
    ) -> Measurement:
        """Run one complete plan under an ablation; a failure is a measurement too."""


class TrialRunner(Protocol):
    """Something that can be explained: a workload, or a script."""

    @property
    def target_name(self) -> str:
        """As a person wrote it."""

    def with_profile(self, profile: ScriptProfile) -> TrialRunner:
        """The same, whose runs are told what they need to know of a script."""

    def refusal_reason(self, trial: Trial) -> str | None:
        """Why the rung cannot be run, without running it, or None."""

    def stored(self, trial: Trial, number: int) -> Measurement | None:
        """What an earlier explanation measured of this rung in this round, or None."""

    def measure(self, trial: Trial, number: int, limit_s: float | None = None) -> Measurement:
        """Run the rung in a fresh process tree, for ``limit_s`` seconds at most; what happened is
        kept when this returns.
        """

    def shared_trial(self, trial: Trial) -> Trial | None:
        """What can be run in one process tree has the same here; None: it is run by itself."""

    def measure_interleaved(
        self, trials: Sequence[Trial], number: int, limit_s: float | None = None
    ) -> list[Measurement]:
        """Run these, which can be run together, in one fresh process tree, as ``measure`` does."""

    def epoch_steps(self, plan: Plan) -> int | None:
        """Steps of an epoch, None where nobody knows before it was run."""


@dataclass(frozen=True, kw_only=True)
class WorkloadRunner:
    """A workload, built-in or by reference, whose measurements are in a store."""

    workload: Workload
    machine: Machine
    options: RunOptions
    store: MeasurementStore
    run: RunFunction
    refusal_rule: RefusalRule
    switchable_fields: SwitchableFields
    training_samples: int | None = None
    ignore_stored: bool = False

    @property
    def target_name(self) -> str:
        """As it was written."""
        return str(self.workload)

    def with_profile(self, profile: ScriptProfile) -> WorkloadRunner:
        """Told what a first look showed."""
        options = dataclasses.replace(self.options, replay_hints=profile.replay_hints)
        return dataclasses.replace(self, options=options)

    def refusal_reason(self, trial: Trial) -> str | None:
        """What the framework says."""
        return self.refusal_rule(self.workload, trial.plan, trial.variant)

    def stored(self, trial: Trial, number: int) -> Measurement | None:
        """The stored result, unless it was cut short or all is to be measured anew."""
        cell = cell_id(self.workload, trial.plan, trial.variant, self.machine)
        found = None if self.ignore_stored else self.store.find(cell, number)
        return found if found is not None and found.is_final else None

    def measure(self, trial: Trial, number: int, limit_s: float | None = None) -> Measurement:
        """Run, and keep it."""
        measurement = self._run(trial, number, limit_s)
        self.store.append(measurement)
        return measurement

    def shared_trial(self, trial: Trial) -> Trial | None:
        """What can change between two steps takes turns, unless whole epochs are timed."""
        switched = self.switchable_fields(self.workload, trial.plan)
        if not switched or trial.plan.epochs is not None or trial.plan.batch is None:
            return None
        return Trial(plan=trial.plan, variant=turns.process_wide(trial.variant, switched))

    def measure_interleaved(
        self, trials: Sequence[Trial], number: int, limit_s: float | None = None
    ) -> list[Measurement]:
        """Run, and keep each."""
        left_out = tuple(rung.variant for rung in trials)
        shared = self.shared_trial(trials[0])
        assert shared is not None
        whole = self._run(shared, number, limit_s, left_out)
        found = split_by_variant(whole, left_out)
        if whole.status == "ok":
            # What had no turn before a script ended is nothing to find again.
            for measurement in filter(ranks_with_windows, found):
                self.store.append(measurement)
        return found

    def _run(
        self,
        trial: Trial,
        number: int,
        limit_s: float | None,
        variants: tuple[Variant, ...] = (),
    ) -> Measurement:
        return self.run(
            self.workload,
            trial.plan,
            trial.variant or None,
            machine=self.machine,
            options=dataclasses.replace(self.options, time_limit_s=limit_s),
            repeat=number,
            interleaved_variants=variants,
        )

    def epoch_steps(self, plan: Plan) -> int | None:
        """By the number of training samples."""
        return None if not self.training_samples else -(-self.training_samples // (plan.batch or 1))
