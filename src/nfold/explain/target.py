"""The seam between the method and what is explained: run a rung, give back its measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nfold import turns
from nfold.ablation import Ablation
from nfold.explain.readings import timed
from nfold.explain.rung import Rung
from nfold.machine import Machine
from nfold.measurement import Measurement, cell_id
from nfold.plan import Plan
from nfold.records import Records
from nfold.run.options import Options
from nfold.run.turned import apart
from nfold.seen import Seen
from nfold.workload import Workload

Refuses = Callable[[Workload, Plan, Ablation], str | None]
"""Why a plan or its ablation cannot be run, or None: what the plan's framework says."""
Switches = Callable[[Workload, Plan], tuple[str, ...]]
"""The fields of an Ablation that can change between two steps: what the plan's framework says."""


class Run(Protocol):
    """The one verb, ``nfold.run.run.run``."""

    def __call__(
        self,
        workload: Workload,
        plan: Plan,
        ablation: Ablation | None = None,
        *,
        machine: Machine,
        options: Options,
        repeat: int,
        turns: tuple[Ablation, ...] = (),
    ) -> Measurement:
        """Run one complete plan under an ablation; a failure is a measurement too."""


class Target(Protocol):
    """Something that can be explained: a workload, or a script."""

    @property
    def name(self) -> str:
        """As a person wrote it."""

    def knowing(self, seen: Seen) -> Target:
        """The same, whose runs are told what they need to know of a script."""

    def refuses(self, rung: Rung) -> str | None:
        """Why the rung cannot be run, without running it, or None."""

    def known(self, rung: Rung, number: int) -> Measurement | None:
        """What an earlier explanation measured of this rung in this round, or None."""

    def measure(self, rung: Rung, number: int, limit_s: float | None = None) -> Measurement:
        """Run the rung in a fresh process tree, for ``limit_s`` seconds at most; what happened is
        kept when this returns.
        """

    def together(self, rung: Rung) -> Rung | None:
        """What can be run in one process tree has the same here; None: it is run by itself."""

    def measure_together(
        self, rungs: Sequence[Rung], number: int, limit_s: float | None = None
    ) -> list[Measurement]:
        """Run these, which can be run together, in one fresh process tree, as ``measure`` does."""

    def epoch_steps(self, plan: Plan) -> int | None:
        """Steps of an epoch, None where nobody knows before it was run."""


@dataclass(frozen=True, kw_only=True)
class WorkloadTarget:
    """A workload, built-in or by reference, whose measurements are in a store."""

    workload: Workload
    machine: Machine
    options: Options
    store: Records
    run: Run
    refusal: Refuses
    switches: Switches
    samples: int | None = None
    again: bool = False

    @property
    def name(self) -> str:
        """As it was written."""
        return str(self.workload)

    def knowing(self, seen: Seen) -> WorkloadTarget:
        """Told what a first look showed."""
        options = dataclasses.replace(self.options, learnt=seen.learnt)
        return dataclasses.replace(self, options=options)

    def refuses(self, rung: Rung) -> str | None:
        """What the framework says."""
        return self.refusal(self.workload, rung.plan, rung.ablation)

    def known(self, rung: Rung, number: int) -> Measurement | None:
        """The stored result, unless it was cut short or all is to be measured anew."""
        cell = cell_id(self.workload, rung.plan, rung.ablation, self.machine)
        found = None if self.again else self.store.find(cell, number)
        return found if found is not None and found.finished else None

    def measure(self, rung: Rung, number: int, limit_s: float | None = None) -> Measurement:
        """Run, and keep it."""
        measurement = self._measured(rung, number, limit_s)
        self.store.append(measurement)
        return measurement

    def together(self, rung: Rung) -> Rung | None:
        """What can change between two steps takes turns, unless whole epochs are timed."""
        switched = self.switches(self.workload, rung.plan)
        if not switched or rung.plan.epochs is not None or rung.plan.batch is None:
            return None
        return Rung(plan=rung.plan, ablation=turns.held(rung.ablation, switched))

    def measure_together(
        self, rungs: Sequence[Rung], number: int, limit_s: float | None = None
    ) -> list[Measurement]:
        """Run, and keep each."""
        left_out = tuple(rung.ablation for rung in rungs)
        shared = self.together(rungs[0])
        assert shared is not None
        whole = self._measured(shared, number, limit_s, left_out)
        found = apart(whole, left_out)
        if whole.status == "ok":
            # What had no turn before a script ended is nothing to find again.
            for measurement in filter(timed, found):
                self.store.append(measurement)
        return found

    def _measured(
        self,
        rung: Rung,
        number: int,
        limit_s: float | None,
        taking: tuple[Ablation, ...] = (),
    ) -> Measurement:
        return self.run(
            self.workload,
            rung.plan,
            rung.ablation or None,
            machine=self.machine,
            options=dataclasses.replace(self.options, limit_s=limit_s),
            repeat=number,
            turns=taking,
        )

    def epoch_steps(self, plan: Plan) -> int | None:
        """By the number of training samples."""
        return None if not self.samples else -(-self.samples // (plan.batch or 1))
