"""A clock for devices that are known only when a script has made its first step."""

from __future__ import annotations

from nfold.frameworks.recording import Clock, HostClock
from nfold.frameworks.torch.clock import clock
from nfold.frameworks.torch.devices import Devices


class LateClock:
    """The host's clock until ``know``; from the next window on, the devices' own."""

    def __init__(self) -> None:
        self._now: Clock = HostClock()
        self._next: Clock = self._now
        self._devices: Devices | None = None

    def know(self, devices: Devices) -> None:
        """These are the devices; the window that is open is fenced by them at its end."""
        self._devices = devices
        self._next = clock(devices)

    def start(self) -> float:
        """As the clock in use."""
        self._now = self._next
        return self._now.start()

    def mark(self) -> None:
        """As the clock in use."""
        self._now.mark()

    def stop(self) -> tuple[float, list[float]]:
        """As the clock in use, with everything done that was queued."""
        if self._devices is not None:
            self._devices.synchronize()
        return self._now.stop()
