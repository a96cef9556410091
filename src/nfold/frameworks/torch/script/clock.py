"""A clock for devices that are known only when a script has made its first step."""

from __future__ import annotations

from nfold.frameworks.clock import HostClock, StepClock
from nfold.frameworks.torch.clock import build_clock
from nfold.frameworks.torch.devices import Devices

FENCE_INTERVAL_S = 2.0
"""From fence to fence. A host that makes 600 small all-reduces a step was 16 ms behind after each,
and five steps of 21 ms took 3 ms a step longer than 40 did."""


class DeferredDeviceClock:
    """The host's clock until ``know``; from the next window on, the devices' own."""

    def __init__(self) -> None:
        self._current: StepClock = HostClock()
        self._next: StepClock = self._current
        self._devices: Devices | None = None
        self.ends_with_step = False
        """Whether the window that is open ends with its last step, and not now."""
        self.ahead_s: float | None = None

    def set_devices(self, devices: Devices) -> None:
        """These are the devices; the window that is open is fenced by them at its end."""
        self._devices = devices
        self._next = build_clock(devices)

    def start(self) -> float:
        """As the clock in use."""
        self._current, self.ends_with_step = self._next, False
        return self._current.start()

    def mark(self) -> None:
        """As the clock in use."""
        self._current.mark()

    def stop(self) -> tuple[float, list[float]]:
        """As the clock in use, with everything done that was queued."""
        if self._devices is not None:
            self._devices.synchronize()
        seconds, call_ms = self._current.stop()
        self.ahead_s = None if self.ends_with_step else self._current.ahead_s
        return (sum(call_ms) / 1e3 if self.ends_with_step else seconds), call_ms
