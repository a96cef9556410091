"""One rank's part of the workload, whatever library computes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nfold.ablation import Variant
from nfold.measurement import OperationPart, Window
from nfold.plan import Plan
from nfold.workloads.conv2d.baselines import LibraryConvolution, measure_library
from nfold.workloads.conv2d.lane import H
from nfold.workloads.conv2d.problem import ConvProblem
from nfold.workloads.conv2d.process import ConvProcess
from nfold.workloads.conv2d.sampling import CallTimer, Clock

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
    variant: Variant = field(default_factory=Variant)

    @property
    def problem(self) -> ConvProblem:
        """The whole problem, of all ranks."""
        return ConvProblem.of(self.parameters, self.plan)

    @property
    def device_images(self) -> list[range]:
        """The images of each of this rank's devices."""
        return self.problem.images_of_rank(self.rank, self.world_size, len(self.devices))

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

    parts: tuple[OperationPart, ...]
    windows: tuple[Window, ...]
    first_step_ms: float
    peak_memory_bytes: int


def first_call(
    begin: Callable[[], ConvProcess[H]], host: H, note: str, clock: Clock
) -> tuple[ConvProcess[H], OperationPart]:
    """Begin a process; the part is the seconds until its first results are on the host."""
    start = clock()
    process = begin()
    process.end_to_end(host)
    seconds = clock() - start
    images, moved = process.problem.images, 2 * process.one_way_bytes
    part = OperationPart(
        name="first call", seconds=(seconds,), images=images, bytes=moved, note=note
    )
    return process, part


def measure_rank(
    task: ConvTask[D],
    process: ConvProcess[H],
    hosts: Mapping[str, H],
    libraries: Sequence[LibraryConvolution],
    first_part: OperationPart,
    clock: Clock,
) -> ConvResult:
    """Verify, time every part, verify what the timed calls left, then time the baselines."""
    expected = process.verify(hosts)
    peak = process.peak_memory_bytes()
    if task.variant:
        probes = [process.throughput_call(hosts, resident=task.variant.input == "resident")]
    else:
        probes = process.timed_calls(hosts)
    sampler = _call_timer(task, clock)
    parts, windows = sampler.run(probes)
    for host in hosts.values():
        process.compare(host, expected)
    others = []
    for baseline in () if process.problem.copy_only or task.variant else libraries:
        others += _measure_on_rank_0(task, baseline, clock)
        sampler.beat_finished(len(probes))
    return ConvResult(
        parts=(first_part, *parts, *others),
        windows=windows,
        first_step_ms=1e3 * first_part.seconds[0],
        peak_memory_bytes=peak,
    )


def _call_timer(task: ConvTask[D], clock: Clock) -> CallTimer:
    assert task.plan.steps is not None
    return CallTimer(
        images=task.problem.images,
        rank_images=sum(map(len, task.device_images)),
        warmup=task.plan.warmup_steps or 0,
        steps=task.plan.steps,
        clock=clock,
        barrier=task.barrier,
        beat=task.beat,
    )


def _measure_on_rank_0(
    task: ConvTask[D], baseline: LibraryConvolution, clock: Clock
) -> list[OperationPart]:
    """Rank 0 measures while the others wait, so that nothing else runs on the host."""
    parts = [measure_library(baseline, task.problem, clock)] if task.rank == 0 else []
    task.barrier()
    return parts
