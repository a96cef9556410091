"""The convolution on JAX's devices, each told what to do by one process.

Programs are jitted and follow their inputs to a device; calls are queued, so that devices work at
the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from nfold.workloads.conv2d.lane import Step
from nfold.workloads.conv2d.problem import Array
from nfold.workloads.conv2d.rank import ConvResult, ConvTask
from nfold.workloads.conv2d.sampling import Clock
from nfold.workloads.conv2d.values import NumpyHost, Place, ValueLane, padding, run_lanes

Task = ConvTask[Any]
"""Its devices are JAX's."""
LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "HWIO", "NCHW")


def run_parts(
    task: Task, peak_memory_bytes: Callable[[], int], clock: Clock = time.monotonic
) -> ConvResult:
    """Time everything that the workload separates."""
    return run_lanes(task, JaxLane, peak_memory_bytes, clock)


class JaxLane(ValueLane):
    """One of JAX's devices."""

    def __init__(
        self, device: Any, place: Place, host: NumpyHost, ones: Array, mean: Array
    ) -> None:
        self.device = device
        super().__init__(place, host, ones, mean)

    @property
    def method(self) -> str:
        """The function, and how it runs."""
        return "lax.conv_general_dilated, compiled, by the host's clock"

    def put(self, values: Array) -> jax.Array:
        """A copy on CPU devices too: otherwise it depends on an array's address whether it is."""
        return jax.device_put(values, self.device, may_alias=False)

    def take(self, value: jax.Array) -> Array:
        """On a CPU device a view, else a copy."""
        return np.asarray(_uncached(value))

    def there_and_back(self, host: NumpyHost, copy_only: bool) -> Sequence[Step]:
        """Every device begins to copy back before the host waits for the first."""
        there, between, _ = super().there_and_back(host, copy_only)
        return [there, between, self._begin, partial(self._end, host)]

    def _begin(self) -> None:
        self._arriving = _uncached(self.result)
        self._arriving.copy_to_host_async()

    def _end(self, host: NumpyHost) -> None:
        host.results[self.place.images] = np.asarray(self._arriving)

    def convolve(self, images: jax.Array, filters: jax.Array) -> jax.Array:
        """``lax.conv_general_dilated``."""
        pads = padding(filters.shape[0])
        return lax.conv_general_dilated(
            images,
            filters,
            window_strides=(1, 1),
            padding=[pads, pads],
            dimension_numbers=LAST if self.place.layout == "channels_last" else FIRST,
        )

    def program(self, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Compiled by XLA when it is first called."""
        made: Callable[..., jax.Array] = jax.jit(function)
        return made

    def wait(self, values: Sequence[jax.Array]) -> None:
        """Wait for these."""
        jax.block_until_ready(list(values))


def _uncached(value: jax.Array) -> jax.Array:
    """The same memory as a new array: an array keeps its first copy on the host for ever."""
    return value.addressable_data(0)
