"""Measurements made by hand: grids with noise, failures, telemetry and parts."""

from __future__ import annotations

import random
from typing import Any

from nfold.core.machine import GpuInfo, GpuLink, Machine
from nfold.core.measurement import (
    Caveat,
    Epoch,
    FailureCause,
    Measurement,
    OperationPart,
    RankSamples,
    Status,
    Window,
)
from nfold.core.plan import Plan, WorkloadDefaults
from nfold.core.workload import Workload

SAMPLES_PER_EPOCH = 50_000
WINDOWS = 12
STEPS_PER_WINDOW = 10


def gpu_machine(gpus: int = 4) -> Machine:
    """A host with GPUs, links and versions."""
    return Machine(
        cpu="AMD EPYC 9654",
        cores=64,
        memory_bytes=512 * 2**30,
        shm_bytes=64 * 2**30,
        os="Linux 6.8",
        python="3.12.3",
        driver="570.86",
        gpus=tuple(
            GpuInfo(index=i, name="NVIDIA H200", memory_bytes=141 * 2**30, pcie="gen5 x16")
            for i in range(gpus)
        ),
        links=tuple(
            GpuLink(first=a, second=b, kind="nvlink", detail="NV18")
            for a in range(gpus)
            for b in range(a + 1, gpus)
        ),
        versions={"torch": "2.11.0", "cuda": "12.8", "nccl": "2.27.3"},
    )


def cpu_machine() -> Machine:
    """A two-core host without a GPU."""
    return Machine(
        cpu="Intel Xeon",
        cores=2,
        memory_bytes=8 * 2**30,
        os="Linux 6.8",
        python="3.11.9",
        versions={"torch": "2.13.0"},
    )


def plan(machine: Machine, **changes: Any) -> Plan:
    """A complete plan, on one device unless told otherwise."""
    return Plan(**{"devices": 1, **changes}).resolve(machine, WorkloadDefaults(batch=128, epochs=3))


def measurement(
    machine: Machine | None = None,
    *,
    workload: str = "cnn10",
    rate: float = 1000.0,
    noise: float = 0.02,
    status: Status = "ok",
    cause: FailureCause | None = None,
    repeat: int = 0,
    doubts: tuple[Caveat, ...] = (),
    ranks: tuple[RankSamples, ...] | None = None,
    energy_joules: float | None = None,
    name: str | None = None,
    folder: str | None = None,
    **changes: Any,
) -> Measurement:
    """A measurement with ``rate`` samples/s of all devices; ``changes`` are plan fields."""
    host = machine or gpu_machine()
    complete = plan(host, **changes)
    made = Measurement(
        id="made",
        workload=Workload.parse(workload),
        plan=complete,
        machine=host,
        status=status,
        repeat=repeat,
        cause=cause,
        ranks=_ranks(complete, rate, noise, repeat) if ranks is None else ranks,
        energy_joules=energy_joules,
        warnings=doubts,
        started_at="2026-11-21T06:00:00+00:00",
        wall_seconds=60.0,
        folder=folder,
    )
    return _named(made, name)


def _named(made: Measurement, name: str | None) -> Measurement:
    values = made.to_dict()
    values["id"] = name or f"{made.cell}-{made.repeat}-abcdef"
    return Measurement.from_dict(values)


def _ranks(plan: Plan, rate: float, noise: float, repeat: int) -> tuple[RankSamples, ...]:
    draw = random.Random(f"{plan.id}-{repeat}")
    speeds = [rate * draw.gauss(1, noise) for _ in range(WINDOWS)]
    return tuple(_rank(plan, rank, speeds, draw) for rank in range(plan.devices or 1))


def _rank(plan: Plan, rank: int, speeds: list[float], draw: random.Random) -> RankSamples:
    batch, devices = plan.batch or 1, plan.devices or 1
    own = batch // devices * STEPS_PER_WINDOW
    windows = []
    start = 100.0
    for speed in speeds:
        seconds = batch * STEPS_PER_WINDOW / speed
        windows.append(Window(start_s=start, seconds=seconds, steps=10, samples=own))
        start += seconds
    return RankSamples(
        rank=rank,
        device=f"{plan.device}:{rank}",
        first_step_ms=850.0,
        warmup_steps=10,
        windows=tuple(windows),
        epochs=_epochs(plan, speeds, draw),
        losses=tuple((10 * k, 2.3 / (1 + 0.15 * k) + draw.gauss(0, 0.03)) for k in range(40)),
        peak_memory_bytes=2**30 + (batch // devices) * 4 * 2**20,
        parameter_count=1_930_000,
    )


def _epochs(plan: Plan, speeds: list[float], draw: random.Random) -> tuple[Epoch, ...]:
    made = []
    for k in range(plan.epochs or 0):
        seconds = SAMPLES_PER_EPOCH / speeds[k % len(speeds)] + (4.0 if k == 0 else 0.0)
        made.append(
            Epoch(
                seconds=seconds,
                samples=SAMPLES_PER_EPOCH,
                train_loss=2.0 / (k + 1),
                accuracy=0.45 + 0.1 * k + draw.gauss(0, 0.01),
            )
        )
    return tuple(made)


def part(
    name: str, ms: float, *, images: int = 840, baseline: bool = False, **more: Any
) -> OperationPart:
    """A timed part of an operation with ten noisy calls."""
    draw = random.Random(f"{name}-{ms}")
    seconds = tuple(ms / 1e3 * draw.gauss(1, 0.03) for _ in range(10))
    return OperationPart(name=name, seconds=seconds, images=images, baseline=baseline, **more)
