"""Time of windows and steps: device events where there are GPUs, the host's clock elsewhere."""

from __future__ import annotations

import itertools
import time

import torch

from nfold.frameworks.clock import HostClock, StepClock
from nfold.frameworks.torch.devices import Devices


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
