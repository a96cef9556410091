"""Whether the host is ahead of a GPU when a window ends."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from nfold.engines.torch.devices import DeviceClock, Devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEPS = 10
CYCLES = 5_000_000
"""Of a kernel that does nothing: some milliseconds."""


def _kernel() -> None:
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call,unused-ignore]


def _kernel_waited_for() -> None:
    _kernel()
    torch.cuda.synchronize()
    time.sleep(0.002)


def _window(step: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a window, and of these those by which the host was ahead at its end."""
    clock = DeviceClock(Devices((torch.device("cuda", 0),)))
    clock.start()
    for _ in range(STEPS):
        step()
        clock.mark()
    seconds, _ = clock.stop()
    assert clock.ahead_s is not None
    return seconds, clock.ahead_s


def test_a_host_that_only_queues_kernels_is_ahead_by_nearly_all_of_them() -> None:
    _window(_kernel)
    seconds, ahead_s = _window(_kernel)
    assert ahead_s > 0.8 * seconds


def test_a_host_that_is_waited_for_is_not_ahead() -> None:
    seconds, ahead_s = _window(_kernel_waited_for)
    assert ahead_s < 0.5 * seconds / STEPS
