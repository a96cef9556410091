"""A framework with planted costs and failures on a virtual clock: the ground truth for tests.

With N devices, a global batch B and no noise, a step takes

    ceil(B / N) · (compute + input + copy) + host + exchange (if N > 1) + straggler

milliseconds on every rank, because ranks wait for each other. Further costs overlap with the step
or act on some ranks (``scenario.py``). Interventions remove costs exactly.
"""

from __future__ import annotations

from typing import ClassVar

from nfold.core.interleave import SWITCHABLE_FIELDS
from nfold.core.machine import Machine
from nfold.core.measurement import RankSamples
from nfold.core.plan import Plan
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.base import Framework, Observer, Task
from nfold.engines.simulated.scenario import PlantedFailure, Scenario
from nfold.engines.simulated.simulation import Simulation, simulate_interleaved
from nfold.workloads import info

__all__ = ["PlantedFailure", "Scenario", "Simulated"]


class Simulated(Framework):
    """Runs a scenario instead of a workload; by default the scenario in NFOLD_SIMULATED."""

    name: ClassVar[str] = "simulated"
    runs_in_parent: ClassVar[bool] = True

    def __init__(self, scenario: Scenario | None = None) -> None:
        self.scenario = Scenario.from_environment() if scenario is None else scenario

    def unsupported_reason(self, workload: Workload, plan: Plan, machine: Machine) -> str | None:
        for axis, values in self.scenario.unsupported.items():
            value = str(getattr(plan, axis))
            if value in values:
                return f"{axis} {value!r} is planted as unsupported"
        return None if workload.script else info(workload.name).unsupported(plan)

    def refusal_reason(self, variant: Variant, workload: Workload, plan: Plan) -> str | None:
        return variant.refusal(plan)

    def switchable_fields(self, workload: Workload, plan: Plan) -> tuple[str, ...]:
        return SWITCHABLE_FIELDS if self.scenario.can_interleave and plan.epochs is None else ()

    def process_count(self, plan: Plan) -> int:
        return 1 if plan.strategy == "dp" else plan.devices or 1

    def run_rank(self, task: Task, observer: Observer) -> RankSamples:
        if task.interleaved_variants:
            return simulate_interleaved(self.scenario, task)
        return Simulation(self.scenario, task).run(observer)
