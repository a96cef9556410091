"""Explaining scripts of the simulated framework: a target without processes, and its budget."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from made import machine, plan
from nfold.ablation import Ablation
from nfold.budget import Budget
from nfold.explain.budget import budget
from nfold.explain.experiment import Clock, Events, Experiment
from nfold.explain.ladder import Ladder, Scaling
from nfold.explain.rung import Rung
from nfold.explain.target import WorkloadTarget
from nfold.frameworks.base import Observer, Task
from nfold.frameworks.simulated import Script, Simulated
from nfold.machine import Machine
from nfold.measurement import Cause, Measurement
from nfold.plan import Plan
from nfold.run.checks import doubts
from nfold.run.options import Options
from nfold.workload import Workload

HOST = machine(gpus=4, cores=64)
WORKLOAD = Workload(name="digits")
SECONDS = 1000.0


class Memory:
    """A store that lasts as long as the test."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], Measurement] = {}

    def find(self, cell: str, repeat: int) -> Measurement | None:
        return self.kept.get((cell, repeat))

    def append(self, measurement: Measurement) -> None:
        self.kept[measurement.cell, measurement.repeat] = measurement


def runner(script: Script) -> Any:
    """``run`` for one script, whatever the environment says."""
    simulated = Simulated(script)

    def run(
        workload: Workload,
        asked: Plan,
        ablation: Ablation | None = None,
        *,
        machine: Machine,
        options: Options,
        repeat: int = 0,
        turns: tuple[Ablation, ...] = (),
    ) -> Measurement:
        del options
        processes = simulated.processes(asked)
        ranks = tuple(
            simulated.run_rank(
                Task(
                    workload=workload,
                    plan=asked,
                    machine=machine,
                    ablation=ablation,
                    rank=rank,
                    local_rank=rank,
                    world_size=processes,
                    repeat=repeat,
                    turns=turns,
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
            ablation=ablation,
            repeat=repeat,
            ranks=ranks,
            warnings=() if turns else tuple(doubts(ranks, ablation)),
            wall_seconds=1.0,
            folder=name if turns else None,
        )

    return run


def script_runner(script: Script) -> Any:
    """``run`` for a script of a user's: its plan says little, and what it makes is seen."""
    usual = runner(script)

    def run(
        workload: Any, asked: Plan, ablation: Ablation | None = None, **more: Any
    ) -> Measurement:
        whole = Plan(batch=200, input="loader", layout="channels_first", step="eager")
        said = {name: value for name, value in asked.to_dict().items() if value is not None}
        strategy = {"strategy": "ddp"} if asked.strategy == "dp" else {}
        done: Measurement = usual(workload, whole.edit(**{**said, **strategy}), ablation, **more)
        return dataclasses.replace(done, plan=asked)

    return run


def target(script: Script, store: Memory | None = None, run: Any = None) -> WorkloadTarget:
    simulated = Simulated(script)

    def refusal(workload: Workload, asked: Plan, ablation: Ablation) -> str | None:
        reason = simulated.unsupported(workload, asked, HOST)
        return reason or simulated.refuses(ablation, workload, asked)

    return WorkloadTarget(
        workload=WORKLOAD,
        machine=HOST,
        options=Options(results=Path("unused")),
        store=store or Memory(),
        run=run or runner(script),
        refusal=refusal,
        switches=simulated.switches,
        samples=script.samples_per_epoch,
    )


def ladder(scaling: Scaling = "strong", **changes: Any) -> Ladder:
    asked = {"framework": "simulated", "device": "cuda", "devices": 2, "batch": 200, "steps": 1}
    return Ladder(plan=plan(HOST, **{**asked, **changes}), scaling=scaling)


def explained(
    script: Script, scaling: Scaling = "strong", seconds: float = SECONDS, **changes: Any
) -> Budget:
    """The whole experiment on the virtual clock."""
    experiment = Experiment(target(script), Clock(seconds), Events())
    measured = experiment.run(ladder(scaling, **changes))
    return budget("digits", measured, experiment.measured)


def failed(rung: Rung, text: str) -> Measurement:
    """A run that ended badly."""
    return Measurement(
        id="failed",
        workload=WORKLOAD,
        plan=rung.plan,
        machine=HOST,
        status="crashed",
        ablation=rung.ablation,
        cause=Cause(text=text),
    )
