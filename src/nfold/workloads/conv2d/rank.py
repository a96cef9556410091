"""One rank's part of the workload, whatever library computes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nfold.ablation import Ablation
from nfold.measurement import Part, Window
from nfold.plan import Plan
from nfold.workloads.conv2d.baselines import Baseline, measure
from nfold.workloads.conv2d.lane import H
from nfold.workloads.conv2d.problem import Problem
from nfold.workloads.conv2d.process import Process
from nfold.workloads.conv2d.sampling import Clock, Sampler

D = TypeVar("D")


@dataclass(frozen=True, kw_only=True)
class ConvTask(Generic[D]):
    """One rank's part. ``plan`` is complete, ``parameters`` are all of the workload's.

    ``devices`` are those that this process drives, the same number on every rank. ``barrier``
    waits for all ranks; ``beat`` takes (calls done, calls planned). Under an experiment, which
    has something ``left_out``, nothing but the measurement's throughput is timed.
    """

    parameters: Mapping[str, int]
    plan: Plan
    rank: int
    world_size: int
    devices: Sequence[D]
    barrier: Callable[[], None]
    beat: Callable[[int, int], None]
    left_out: Ablation = field(default_factory=Ablation)

    @property
    def problem(self) -> Problem:
        """The whole problem, of all ranks."""
        return Problem.of(self.parameters, self.plan)

    @property
    def shares(self) -> list[range]:
        """The images of each of this rank's devices."""
        return self.problem.shares(self.rank, self.world_size, len(self.devices))

    @property
    def cores(self) -> int:
        """The cores this process may use, at most the plan's: a mask does not show a quota."""
        planned = (self.plan.cores_per_device or 1) * (self.plan.devices or 1)
        return min(len(os.sched_getaffinity(0)), planned)


@dataclass(frozen=True, kw_only=True)
class ConvResult:
    """What one rank measured, under the names of ``RankSamples``.

    ``peak_memory_bytes`` is that of the way end to end, before the cache probes took buffers
    of their own: what the library's allocator held on the fullest device, or on the CPU what
    the process held.
    """

    parts: tuple[Part, ...]
    windows: tuple[Window, ...]
    first_step_ms: float
    peak_memory_bytes: int


def first_call(
    begin: Callable[[], Process[H]], host: H, note: str, clock: Clock
) -> tuple[Process[H], Part]:
    """Begin a process; the part is the seconds until its first results are on the host."""
    start = clock()
    process = begin()
    process.end_to_end(host)
    seconds = clock() - start
    images, moved = process.problem.images, 2 * process.one_way_bytes
    part = Part(name="first call", seconds=(seconds,), images=images, bytes=moved, note=note)
    return process, part


def measure_rank(
    task: ConvTask[D],
    process: Process[H],
    hosts: Mapping[str, H],
    baselines: Sequence[Baseline],
    first: Part,
    clock: Clock,
) -> ConvResult:
    """Verify, time every part, verify what the timed calls left, then time the baselines."""
    expected = process.verify(hosts)
    peak = process.peak_memory_bytes()
    if task.left_out:
        probes = [process.throughput(hosts, resident=task.left_out.input == "resident")]
    else:
        probes = process.probes(hosts)
    sampler = _sampler(task, clock)
    parts, windows = sampler.run(probes)
    for host in hosts.values():
        process.compare(host, expected)
    others = []
    for baseline in () if process.problem.copy_only or task.left_out else baselines:
        others += _measure_baseline(task, baseline, clock)
        sampler.beat_all(len(probes))
    return ConvResult(
        parts=(first, *parts, *others),
        windows=windows,
        first_step_ms=1e3 * first.seconds[0],
        peak_memory_bytes=peak,
    )


def _sampler(task: ConvTask[D], clock: Clock) -> Sampler:
    assert task.plan.steps is not None
    return Sampler(
        images=task.problem.images,
        own_images=sum(map(len, task.shares)),
        warmup=task.plan.warmup_steps or 0,
        steps=task.plan.steps,
        clock=clock,
        barrier=task.barrier,
        beat=task.beat,
    )


def _measure_baseline(task: ConvTask[D], baseline: Baseline, clock: Clock) -> list[Part]:
    """Rank 0 measures while the others wait, so that nothing else runs on the host."""
    parts = [measure(baseline, task.problem, clock)] if task.rank == 0 else []
    task.barrier()
    return parts
