"""Explaining scripts of the simulated framework: a target without processes, and its budget."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from made import machine, plan
from nfold.core.machine import Machine
from nfold.core.measurement import FailureCause, Measurement
from nfold.core.plan import Plan
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.base import Observer, Task
from nfold.engines.simulated import Scenario, Simulated
from nfold.explain.attribution import build_budget
from nfold.explain.design import ExperimentDesign, Scaling, Trial
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.result.budget import Budget
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import WorkloadRunner
from nfold.launch.launch_spec import RunOptions
from nfold.launch.verdict import rank_caveats

HOST = machine(gpus=4, cores=64)
WORKLOAD = Workload(name="digits")
SECONDS = 1000.0
EXPLAINED: dict[str, Budget] = {}


class Memory:
    """A store that lasts as long as the test."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], Measurement] = {}

    def find(self, cell: str, repeat: int) -> Measurement | None:
        return self.kept.get((cell, repeat))

    def append(self, measurement: Measurement) -> None:
        self.kept[measurement.cell, measurement.repeat] = measurement


def runner(script: Scenario) -> Any:
    """``run`` for one script, whatever the environment says."""
    simulated = Simulated(script)

    def run(
        workload: Workload,
        asked: Plan,
        ablation: Variant | None = None,
        *,
        machine: Machine,
        options: RunOptions,
        repeat: int = 0,
        interleaved_variants: tuple[Variant, ...] = (),
    ) -> Measurement:
        del options
        processes = simulated.process_count(asked)
        ranks = tuple(
            simulated.run_rank(
                Task(
                    workload=workload,
                    plan=asked,
                    machine=machine,
                    requested_variant=ablation,
                    rank=rank,
                    local_rank=rank,
                    world_size=processes,
                    repeat=repeat,
                    interleaved_variants=interleaved_variants,
                ),
                Observer(),
            )
            for rank in range(processes)
        )
        name = f"{asked.id}-{ablation}-{repeat}"
        return Measurement(
            id=name,
            workload=workload,
            plan=asked,
            machine=machine,
            status="ok",
            variant=ablation,
            repeat=repeat,
            ranks=ranks,
            warnings=() if interleaved_variants else tuple(rank_caveats(ranks, ablation)),
            wall_seconds=1.0,
            folder=name if interleaved_variants else None,
        )

    return run


def script_runner(script: Scenario) -> Any:
    """``run`` for a script of a user's: its plan says little, and what it makes is seen."""
    usual = runner(script)

    def run(
        workload: Any, asked: Plan, ablation: Variant | None = None, **more: Any
    ) -> Measurement:
        whole = Plan(batch=200, input="loader", layout="channels_first", step="eager")
        said = {name: value for name, value in asked.to_dict().items() if value is not None}
        strategy = {"strategy": "ddp"} if asked.strategy == "dp" else {}
        done: Measurement = usual(workload, whole.edit(**{**said, **strategy}), ablation, **more)
        return dataclasses.replace(done, plan=asked)

    return run


def target(script: Scenario, store: Memory | None = None, run: Any = None) -> WorkloadRunner:
    simulated = Simulated(script)

    def refusal(workload: Workload, asked: Plan, ablation: Variant) -> str | None:
        reason = simulated.unsupported_reason(workload, asked, HOST)
        return reason or simulated.refusal_reason(ablation, workload, asked)

    return WorkloadRunner(
        workload=WORKLOAD,
        machine=HOST,
        options=RunOptions(results=Path("unused")),
        store=store or Memory(),
        run=run or runner(script),
        refusal_rule=refusal,
        switchable_fields=simulated.switchable_fields,
        training_samples=script.samples_per_epoch,
    )


def experiment_design(scaling: Scaling = "strong", **changes: Any) -> ExperimentDesign:
    asked = {"framework": "simulated", "device": "cuda", "devices": 2, "batch": 200, "steps": 1}
    return ExperimentDesign(plan=plan(HOST, **{**asked, **changes}), scaling=scaling)


def explained(
    script: Scenario, scaling: Scaling = "strong", seconds: float = SECONDS, **changes: Any
) -> Budget:
    """The whole experiment on the virtual clock, computed once."""
    key = repr((script, scaling, seconds, changes))
    if key not in EXPLAINED:
        experiment = Experiment(target(script), TimeBudget(seconds), ExperimentEvents())
        measured = experiment.run(experiment_design(scaling, **changes))
        EXPLAINED[key] = build_budget("digits", measured, experiment.results)
    return EXPLAINED[key]


def failed(rung: Trial, text: str) -> Measurement:
    """A run that ended badly."""
    return Measurement(
        id="failed",
        workload=WORKLOAD,
        plan=rung.plan,
        machine=HOST,
        status="crashed",
        variant=rung.variant,
        cause=FailureCause(text=text),
    )
