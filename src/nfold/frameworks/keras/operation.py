"""Operations on TensorFlow or JAX: one process tells every device of a plan what to do."""

from __future__ import annotations

import importlib
import os
from typing import Any

from nfold import workloads
from nfold.frameworks.base import Observer, Phase, Task
from nfold.frameworks.keras.opened import backend_environment, translate_errors
from nfold.measurement import RankSamples
from nfold.plan import Plan


def run_operation(task: Task, observer: Observer) -> RankSamples:
    """Run an operation to its end; raises OutOfMemory, Mismatch or Unsupported.

    It is written in the framework itself: of Keras nothing is imported.
    """
    plan = task.plan
    os.environ.update(backend_environment(plan, dict(os.environ)))

    def beat(done: int, planned: int) -> None:
        observer.beat(Phase.STEPPING if done else Phase.FIRST_STEP, done, planned)

    with translate_errors(plan.framework):
        devices = _open_devices(plan)
        name = f"nfold.workloads.{task.workload.name}.{plan.framework}"
        definition = importlib.import_module(name)
        result = definition.run_parts(
            definition.Task(
                parameters=workloads.parameters(task.workload),
                plan=plan,
                rank=0,
                world_size=1,
                devices=devices.devices,
                barrier=_no_barrier,
                beat=beat,
            ),
            lambda: devices.memory()["peak_memory_bytes"],
        )
    return RankSamples(
        rank=0,
        device=devices.describe(),
        first_step_ms=result.first_step_ms,
        warmup_steps=plan.warmup_steps or 0,
        windows=result.windows,
        parts=result.parts,
        peak_memory_bytes=result.peak_memory_bytes,
        reserved_memory_bytes=devices.memory()["reserved_memory_bytes"],
    )


def _no_barrier() -> None:
    """No other rank to wait for."""


def _open_devices(plan: Plan) -> Any:
    if plan.framework == "jax":
        from nfold.frameworks.keras.jax_devices import open_jax_devices

        return open_jax_devices(plan)
    from nfold.frameworks.keras.replicas import open_replicas

    return open_replicas(plan)
