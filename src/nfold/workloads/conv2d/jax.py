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

from nfold.workloads.conv2d.array_device import (
    ArrayDevice,
    DeviceSetup,
    NumpyHostBuffers,
    run_devices,
    same_padding,
)
from nfold.workloads.conv2d.device import DeviceAction
from nfold.workloads.conv2d.problem import Array
from nfold.workloads.conv2d.process import ConvResult, ConvTask
from nfold.workloads.conv2d.timing import Clock

Task = ConvTask[Any]  # its devices are JAX's
NHWC_DIMENSIONS, NCHW_DIMENSIONS = ("NHWC", "HWIO", "NHWC"), ("NCHW", "HWIO", "NCHW")


def run_parts(
    task: Task, peak_memory_bytes: Callable[[], int], clock: Clock = time.monotonic
) -> ConvResult:
    """Time everything that the workload separates."""
    return run_devices(task, JaxConvDevice, peak_memory_bytes, clock)


class JaxConvDevice(ArrayDevice):
    """One of JAX's devices."""

    def __init__(
        self, device: Any, setup: DeviceSetup, host: NumpyHostBuffers, ones: Array, mean: Array
    ) -> None:
        self.device = device
        super().__init__(setup, host, ones, mean)

    @property
    def method(self) -> str:
        return "lax.conv_general_dilated, compiled, by the host's clock"

    def to_device(self, values: Array) -> jax.Array:
        return jax.device_put(values, self.device, may_alias=False)

    def to_host(self, value: jax.Array) -> Array:
        return np.asarray(_without_host_cache(value))

    def round_trip(self, host: NumpyHostBuffers, copy_only: bool) -> Sequence[DeviceAction]:
        there, between, _ = super().round_trip(host, copy_only)
        return [there, between, self._start_download, partial(self._finish_download, host)]

    def _start_download(self) -> None:
        self._arriving = _without_host_cache(self.result)
        self._arriving.copy_to_host_async()

    def _finish_download(self, host: NumpyHostBuffers) -> None:
        host.results[self.setup.images] = np.asarray(self._arriving)

    def convolve(self, images: jax.Array, filters: jax.Array) -> jax.Array:
        pads = same_padding(filters.shape[0])
        return lax.conv_general_dilated(
            images,
            filters,
            window_strides=(1, 1),
            padding=[pads, pads],
            dimension_numbers=NHWC_DIMENSIONS
            if self.setup.layout == "channels_last"
            else NCHW_DIMENSIONS,
        )

    def compile(self, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        made: Callable[..., jax.Array] = jax.jit(function)
        return made

    def wait(self, values: Sequence[jax.Array]) -> None:
        jax.block_until_ready(list(values))


def _without_host_cache(value: jax.Array) -> jax.Array:
    return value.addressable_data(0)
