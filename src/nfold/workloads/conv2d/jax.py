"""The convolution on JAX devices in one process.

Jitted programs run on the device of their inputs. Calls are queued, so that devices run in
parallel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from jax import lax

from nfold.workloads.conv2d.array_device import (
    ArrayDevice,
    NumpyHostBuffers,
    run_devices,
    same_padding,
)
from nfold.workloads.conv2d.device import DeviceAction
from nfold.workloads.conv2d.problem import Array
from nfold.workloads.conv2d.problem import ConvTask as Task
from nfold.workloads.conv2d.process import Clock, ConvResult


def run_parts(
    task: Task, peak_memory_bytes: Callable[[], int], clock: Clock = time.monotonic
) -> ConvResult:
    return run_devices(task, JaxConvDevice, peak_memory_bytes, clock)


class JaxConvDevice(ArrayDevice):
    method = "lax.conv_general_dilated, compiled, by the host's clock"

    def create_input(self, images: Array) -> jax.Array:
        return jax.device_put(images, self.device, may_alias=False)

    def to_host(self, value: jax.Array) -> Array:
        return np.asarray(_without_host_cache(value))

    def round_trip(self, host: NumpyHostBuffers, copy_only: bool) -> Sequence[DeviceAction]:
        upload, compute, _ = super().round_trip(host, copy_only)
        return [upload, compute, self._start_download, partial(self._finish_download, host)]

    def _start_download(self) -> None:
        self._download = _without_host_cache(self.result)
        self._download.copy_to_host_async()

    def _finish_download(self, host: NumpyHostBuffers) -> None:
        host.results[self.image_slice] = np.asarray(self._download)

    def convolve(self, images: jax.Array, filters: jax.Array) -> jax.Array:
        padding = [same_padding(filters.shape[0])] * 2
        axes = "NHWC" if self.plan.layout == "channels_last" else "NCHW"
        return lax.conv_general_dilated(
            images, filters, (1, 1), padding, dimension_numbers=(axes, "HWIO", axes)
        )

    def compile(self, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        compiled: Callable[..., jax.Array] = jax.jit(function)
        return compiled

    def wait(self, values: Sequence[jax.Array]) -> None:
        jax.block_until_ready(list(values))


def _without_host_cache(value: jax.Array) -> jax.Array:
    return value.addressable_data(0)
