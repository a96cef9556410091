"""A framework with planted costs and failures: exact, instant, the truth that tests compare with.

Nothing is computed and nobody sleeps: the clock is virtual. With N devices that share a global
batch B and no noise, one step takes

    ceil(B / N) · (compute + input + copy) + host + exchange (where N > 1) + straggler

milliseconds, and every rank's windows hold that time, because ranks wait for each other. Other
costs of a script hide behind a step or act on some ranks (``script.py``), and ablations take
them away exactly (``cost.py``).
"""

from __future__ import annotations

from typing import ClassVar

from nfold.ablation import Ablation
from nfold.frameworks.base import Framework, Observer, Task
from nfold.frameworks.simulated.script import Planted, Script
from nfold.frameworks.simulated.simulation import Simulation
from nfold.frameworks.simulated.turns import in_turns
from nfold.machine import Machine
from nfold.measurement import RankSamples
from nfold.plan import Plan
from nfold.turns import SWITCHED
from nfold.workload import Workload
from nfold.workloads import info

__all__ = ["Planted", "Script", "Simulated"]


class Simulated(Framework):
    """Runs a script instead of a workload. Without one, the environment's."""

    name: ClassVar[str] = "simulated"
    in_parent: ClassVar[bool] = True

    def __init__(self, script: Script | None = None) -> None:
        self.script = Script.from_environment() if script is None else script

    def unsupported(self, workload: Workload, plan: Plan, machine: Machine) -> str | None:
        """The first planted refusal that the plan meets, or what the workload has against it."""
        for axis, values in self.script.unsupported.items():
            value = str(getattr(plan, axis))
            if value in values:
                return f"{axis} {value!r} is planted as unsupported"
        return None if workload.script else info(workload.name).unsupported(plan)

    def refuses(self, ablation: Ablation, workload: Workload, plan: Plan) -> str | None:
        """Every ablation that makes sense for the plan is honoured, exactly."""
        return ablation.refusal(plan)

    def switches(self, workload: Workload, plan: Plan) -> tuple[str, ...]:
        """All that any framework can, where the script says so."""
        return SWITCHED if self.script.in_turns and plan.epochs is None else ()

    def processes(self, plan: Plan) -> int:
        """One process a device, except under ``dp``."""
        return 1 if plan.strategy == "dp" else plan.devices or 1

    def run_rank(self, task: Task, observer: Observer) -> RankSamples:
        """All steps of one rank on the virtual clock, or its planted failure; with turns, none."""
        if task.turns:
            return in_turns(self.script, task)
        return Simulation(self.script, task).run(observer)
