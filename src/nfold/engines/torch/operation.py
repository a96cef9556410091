"""Operations: one timed computation split over the devices, such as conv2d."""

from __future__ import annotations

import importlib
from functools import partial

from nfold import workloads
from nfold.core.measurement import RankSamples
from nfold.engines.base import Observer, Phase, Task
from nfold.engines.torch.communication import data_parallel
from nfold.engines.torch.devices import open_devices, task_devices
from nfold.engines.torch.error_translation import translate_errors


def run_operation(task: Task, observer: Observer) -> RankSamples:
    """Run one rank of an operation. Raises OutOfMemory, Collateral or Mismatch.

    Without a process group CUDA starts in the first call, which is timed with it.
    """
    lazy = task.world_size == 1 and task.plan.device == "cuda"
    devices = task_devices(task) if lazy else open_devices(task)
    definition = importlib.import_module(f"nfold.workloads.{task.workload.name}.torch")

    def beat(done: int, planned: int) -> None:
        observer.beat(Phase.STEPPING if done else Phase.FIRST_STEP, done, planned)

    with translate_errors(devices.peak_memory_bytes), data_parallel.process_group(task, devices):
        result = definition.run_parts(
            definition.TorchTask(
                parameters=workloads.parameters(task.workload),
                plan=task.plan,
                rank=task.rank,
                world_size=task.world_size,
                devices=devices.all,
                barrier=partial(data_parallel.barrier, task.world_size),
                beat=beat,
                variant=task.variant,
            )
        )
    return RankSamples(
        rank=task.rank,
        device=devices.describe(),
        first_step_ms=result.first_step_ms,
        warmup_steps=task.plan.warmup_steps or 0,
        windows=result.windows,
        parts=result.parts,
        peak_memory_bytes=result.peak_memory_bytes,
    )
