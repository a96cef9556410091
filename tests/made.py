"""Small values that many tests make: machines, plans, tasks, arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from nfold.core.machine import GpuInfo, Machine
from nfold.core.plan import Plan, WorkloadDefaults
from nfold.core.workload import Workload
from nfold.data.arrays import DataSetArrays
from nfold.engines.base import Task


def machine(*, gpus: int = 0, cores: int = 2) -> Machine:
    """A machine with ``gpus`` identical GPUs."""
    found = tuple(GpuInfo(index=i, name="GPU", memory_bytes=2**34) for i in range(gpus))
    return Machine(cpu="CPU", cores=cores, memory_bytes=2**34, gpus=found)


def plan(host: Machine | None = None, **changes: Any) -> Plan:
    """A complete plan on ``host`` (two cores), ``changes`` over a short run's defaults."""
    asked = Plan(**{"device": "cpu", "devices": 1, "batch": 16, **changes})
    return asked.resolve(host or machine(), WorkloadDefaults(batch=16, epochs=1))


def task(*, rank: int = 0, world_size: int = 1, workload: str = "digits", **changes: Any) -> Task:
    """One rank's task on the two-core machine."""
    host = machine(cores=max(2, world_size))
    complete = plan(host, devices=world_size, **changes)
    return Task(
        workload=Workload.parse(workload),
        plan=complete,
        machine=host,
        rank=rank,
        local_rank=rank,
        world_size=world_size,
    )


def arrays(samples: int, classes: int = 10) -> DataSetArrays:
    """Random 8 × 8 images with labels, the same every time."""
    draw = np.random.default_rng(0)
    return DataSetArrays(
        name="made",
        classes=classes,
        train_images=draw.integers(0, 256, (samples, 8, 8, 1), dtype=np.uint8),
        train_labels=draw.integers(0, classes, samples),
        test_images=draw.integers(0, 256, (samples // 2, 8, 8, 1), dtype=np.uint8),
        test_labels=draw.integers(0, classes, samples // 2),
        mean=(128.0,),
        std=(74.0,),
    )
