"""The devices that one rank drives: opening, synchronizing, memory, clock."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import torch

from nfold.core import machine
from nfold.engines.base import Task
from nfold.engines.step_clock import HostClock, StepClock


@dataclass(frozen=True)
class Devices:
    """``all`` has one device, or every device under nn.DataParallel; ``primary`` is the first."""

    all: tuple[torch.device, ...]

    @property
    def primary(self) -> torch.device:
        return self.all[0]

    @property
    def is_cuda(self) -> bool:
        return self.primary.type == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            for device in self.all:
                torch.cuda.synchronize(device)

    def peak_memory_bytes(self) -> int:
        """Return the peak of PyTorch's allocator on the fullest GPU; on CPU, peak RSS."""
        if self.is_cuda:
            return max(torch.cuda.max_memory_reserved(device) for device in self.all)
        return machine.peak_resident_bytes()

    def reserved_memory_bytes(self) -> int | None:
        """Return the peak that PyTorch's allocator reserved on the fullest GPU; None on CPU."""
        return self.peak_memory_bytes() if self.is_cuda else None

    def allocator_retries(self) -> int:
        """Return how often PyTorch's allocator freed its cache because a GPU was full."""
        if not self.is_cuda:
            return 0
        return sum(torch.cuda.memory_stats(one).get("num_alloc_retries", 0) for one in self.all)

    def describe(self) -> str:
        if not self.is_cuda:
            return str(self.primary)
        names = sorted({torch.cuda.get_device_name(device) for device in self.all})
        return f"{', '.join(map(str, self.all))} {' / '.join(names)}"


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or the available memory of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return machine.free_memory_bytes()


def task_devices(task: Task) -> Devices:
    """Return the devices of this rank. Does not touch them: CUDA starts with their first use."""
    if task.plan.device == "cpu":
        return Devices((torch.device("cpu"),))
    all_devices = task.plan.strategy == "dp"
    indices = range(task.plan.devices or 1) if all_devices else [task.local_rank]
    return Devices(tuple(torch.device("cuda", index) for index in indices))


def current_devices() -> Devices:
    """Return the device that code in this process computes on: its current GPU, else the CPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return Devices((torch.device("cuda", torch.cuda.current_device()),))
    return Devices((torch.device("cpu"),))


def open_devices(task: Task) -> Devices:
    """Return the devices of this rank, made current, with cuDNN set up.

    cuDNN searches for its fastest algorithms, by default among ten; among all if kernels are tuned.
    Not under nn.DataParallel, which starts new threads in every forward: cuDNN caches results per
    thread and would search in every step (docs/decisions/kernels-and-layout.md).
    """
    devices = task_devices(task)
    if devices.is_cuda:
        torch.cuda.set_device(devices.primary)
        torch.backends.cudnn.benchmark = task.plan.strategy != "dp"
        if task.plan.kernels == "tuned":
            torch.backends.cudnn.benchmark_limit = 0
    else:
        torch.set_num_threads(task.plan.cores_per_device or 1)
    return devices


class DeviceClock:
    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._pool: list[torch.cuda.Event] = []
        self._used = 0
        self._started = self._marked = 0.0
        self.ahead_s: float | None = None

    def start(self) -> float:
        self._devices.synchronize()
        self._used = 0
        self._started = time.monotonic()
        self.mark()
        return self._started

    def mark(self) -> None:
        """Record an event on the current stream of the first device.

        It need not be the current device: scripts use ``cuda:1`` without ``torch.cuda.set_device``.
        """
        if self._used == len(self._pool):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._pool.append(event)
        self._pool[self._used].record(torch.cuda.current_stream(self._devices.primary))
        self._used += 1
        self._marked = time.monotonic()

    def stop(self) -> tuple[float, list[float]]:
        self._devices.synchronize()
        now = time.monotonic()
        seconds, self.ahead_s = now - self._started, now - self._marked
        pairs = itertools.pairwise(self._pool[: self._used])
        return seconds, [before.elapsed_time(after) for before, after in pairs]


def build_clock(devices: Devices) -> StepClock:
    return DeviceClock(devices) if devices.is_cuda else HostClock()
