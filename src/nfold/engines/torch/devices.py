"""The devices that one rank drives: opening them, fencing them, asking for their memory."""

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
    """``all`` has one device, or under nn.DataParallel every device; ``primary`` is its first."""

    all: tuple[torch.device, ...]

    @property
    def primary(self) -> torch.device:
        """Where inputs go and where the loss is."""
        return self.all[0]

    @property
    def is_cuda(self) -> bool:
        """Whether these are GPUs."""
        return self.primary.type == "cuda"

    def synchronize(self) -> None:
        """Wait for everything that was queued on the devices."""
        if self.is_cuda:
            for device in self.all:
                torch.cuda.synchronize(device)

    def peak_memory_bytes(self) -> int:
        """The most that PyTorch's allocator held on the fullest device; on CPU, peak RSS."""
        if self.is_cuda:
            return max(torch.cuda.max_memory_reserved(device) for device in self.all)
        return machine.peak_resident_bytes()

    def reserved_memory_bytes(self) -> int | None:
        """The most that PyTorch's allocator took from the fullest GPU; None on CPU devices."""
        return self.peak_memory_bytes() if self.is_cuda else None

    def allocator_retries(self) -> int:
        """How often PyTorch's allocator gave back what it kept, because a GPU had no more."""
        if not self.is_cuda:
            return 0
        return sum(torch.cuda.memory_stats(one).get("num_alloc_retries", 0) for one in self.all)

    def describe(self) -> str:
        """For example ``cuda:1 NVIDIA H200`` or ``cpu:0``."""
        if not self.is_cuda:
            return str(self.primary)
        names = sorted({torch.cuda.get_device_name(device) for device in self.all})
        return f"{', '.join(map(str, self.all))} {' / '.join(names)}"


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that nobody holds; of a CPU device, what the host has available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return machine.free_memory_bytes()


def task_devices(task: Task) -> Devices:
    """The devices of this rank, not yet touched: CUDA starts with their first use."""
    if task.plan.device == "cpu":
        return Devices((torch.device("cpu"),))
    if task.plan.strategy == "dp":
        indices = range(task.plan.devices or 1)
    else:
        indices = range(task.local_rank, task.local_rank + 1)
    return Devices(tuple(torch.device("cuda", index) for index in indices))


def current_devices() -> Devices:
    """What somebody else's code in this process computes on: its current GPU, else the CPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return Devices((torch.device("cuda", torch.cuda.current_device()),))
    return Devices((torch.device("cpu"),))


def open_devices(task: Task) -> Devices:
    """The devices of this rank, made current; cuDNN may search for its fastest algorithms.

    Not under nn.DataParallel: it starts new threads in every forward, and what cuDNN found is
    kept per thread, so that it would search again in every step (210 ms a step on two H200s
    for cnn10 at batch 128, docs/decisions/kernels-and-layout.md). By itself cuDNN tries ten algorithms and takes
    the fastest; where kernels are tuned it tries all.
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
    """For GPUs: an event after each step, read after the window's closing fence."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._pool: list[torch.cuda.Event] = []
        self._used = 0
        self._started = self._marked = 0.0
        self.ahead_s: float | None = None

    def start(self) -> float:
        """Fence, then begin."""
        self._devices.synchronize()
        self._used = 0
        self._started = time.monotonic()
        self.mark()
        return self._started

    def mark(self) -> None:
        """Record an event on the current stream of the first device.

        That need not be the process's current device: scripts drive ``cuda:1`` without
        ``torch.cuda.set_device``.
        """
        if self._used == len(self._pool):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._pool.append(event)
        self._pool[self._used].record(torch.cuda.current_stream(self._devices.primary))
        self._used += 1
        self._marked = time.monotonic()

    def stop(self) -> tuple[float, list[float]]:
        """Fence, then read the events."""
        self._devices.synchronize()
        now = time.monotonic()
        seconds, self.ahead_s = now - self._started, now - self._marked
        events = self._pool[: self._used]
        pairs = itertools.pairwise(events)
        return seconds, [before.elapsed_time(after) for before, after in pairs]


def build_clock(devices: Devices) -> StepClock:
    """The clock that suits the devices."""
    return DeviceClock(devices) if devices.is_cuda else HostClock()
