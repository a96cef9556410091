"""nfold's own step: a plan whose fields are the arm's, driven as ``nfold bench`` drives it.

The workload is cut to whole batches, so that like its peers it has no incomplete last one.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from job import Job, run

from nfold.core.plan import MINIMUM_VALUES, Plan
from nfold.core.variant import Variant
from nfold.engines.base import Task
from nfold.engines.rank_process import pin_to_cores
from nfold.telemetry.machine_inspection import inspect_machine


def main(job: Job, ablation: Variant | None = None) -> None:
    task = task_of(job, ablation)
    with pin_to_cores(task.plan, task.local_rank):
        drive(job, task)


def drive(job: Job, task: Task) -> None:
    """Train without end; torch is imported only here, inside the claimed cores."""
    from common import joined, turns_of

    from nfold.engines.torch.devices import open_devices
    from nfold.engines.torch.step.cuda_graph import WARM_UP_CALLS
    from nfold.engines.torch.step.training_step import group_batches
    from nfold.engines.torch.trainer import Trainer

    devices = open_devices(task)
    with joined(job, devices, leave=False):
        trainer = Trainer(task, devices)
        turns = turns_of(job, devices, queued_steps=4 * (task.plan.workers or 0))
        trainer.model.train()
        for epoch in itertools.count():
            trainer.source.epoch = epoch
            apart = 0 if epoch else WARM_UP_CALLS
            for batches in group_batches(
                trainer.source, task.plan.steps_per_execution, single_batches=apart
            ):
                turns.step(trainer.run_steps(batches, 0).reshape(-1)[-1], len(batches))


def task_of(job: Job, ablation: Variant | None = None) -> Task:
    """This rank's task; what the fields do not say, nfold chooses on this machine."""
    repeat = job.parameters.get("repeat", 1)
    samples = len(job.arrays().train_labels) // repeat
    whole = job.batch // math.gcd(job.batch, repeat)
    machine = inspect_machine()
    plan = asked(job).resolve(machine, job.info.defaults)
    return Task(
        workload=job.workload.with_parameters(samples=samples - samples % whole),
        plan=plan,
        machine=machine,
        requested_variant=ablation,
        rank=job.rank,
        local_rank=job.local_rank,
        world_size=job.world_size,
    )


def asked(job: Job) -> Plan:
    """The plan that the fields write, with the arm's devices and batch."""
    fields: dict[str, Any] = {
        name: int(value) if name in MINIMUM_VALUES else value for name, value in job.fields.items()
    }
    return Plan(device=job.device, devices=job.world_size, batch=job.batch, epochs=1).edit(**fields)


if __name__ == "__main__":
    run(main)
