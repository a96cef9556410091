"""The convolution by a library with immutable arrays: TensorFlow or JAX. Imports neither.

Images and results on the host are NumPy arrays. These libraries have no device clock: the host's
clock is read after waiting for the device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nfold.workloads.conv2d.device import ConvDevice, HostBuffers, KernelTimer, ReadSeconds
from nfold.workloads.conv2d.problem import Array, ConvTask
from nfold.workloads.conv2d.process import SCIPY_LIBRARIES, Clock, ConvResult, run_rank

DeviceArray = Any
GPU_CHAIN = 50
GPU_EVICTION_BYTES = 512 * 2**20  # several times the largest cache of a GPU
FIRST_CALL_NOTE = (
    "allocation, copies, tracing and compilation, convolution; the library runs already"
)


@dataclass(frozen=True, kw_only=True)
class NumpyHostBuffers(HostBuffers):
    layout: str

    @classmethod
    def of(cls, images: Array, layout: str) -> NumpyHostBuffers:
        axes = (0, 2, 3, 1) if layout == "channels_last" else (0, 1, 2, 3)
        ordered = np.ascontiguousarray(images.transpose(axes))
        return cls(images=ordered, results=np.empty_like(ordered), layout=layout)

    def to_float32(self, values: Array, indices: Sequence[int]) -> Array:
        chosen = values[list(indices)]
        return chosen.transpose(0, 3, 1, 2) if self.layout == "channels_last" else chosen

    def fill_nan(self) -> None:
        self.results.fill(np.nan)


class ArrayDevice(ConvDevice[NumpyHostBuffers]):
    """A device of TensorFlow or JAX. Copies to and from CPU devices are explicit, too."""

    @abstractmethod
    def create_input(self, images: Array) -> DeviceArray: ...

    @abstractmethod
    def to_host(self, value: DeviceArray) -> Array:
        """Wait for an array and return it, valid until the next call."""

    @abstractmethod
    def convolve(self, images: DeviceArray, filters: DeviceArray) -> DeviceArray:
        """Correlate images with filters [k, k, in, out], padded by ``same_padding``."""

    @abstractmethod
    def compile(self, function: Callable[..., DeviceArray]) -> Callable[..., DeviceArray]:
        """Compile a function according to the plan's ``step``."""

    @abstractmethod
    def wait(self, values: Sequence[DeviceArray]) -> None:
        """Wait until the arrays are computed."""

    def create_filters(self, filters: Array) -> DeviceArray:
        return self.create_input(np.ascontiguousarray(filters.transpose(2, 3, 1, 0)))

    def upload(self, host: NumpyHostBuffers) -> None:
        self.input = self.create_input(host.images[self.image_slice])

    @cached_property
    def _convolution(self) -> Callable[..., DeviceArray]:
        return self.compile(self.convolve)

    def compute(self) -> None:
        self.result = self._convolution(self.input, self.filters)

    def download(self, host: NumpyHostBuffers) -> None:
        host.results[self.image_slice] = self.to_host(self.result)

    def finish(self) -> None:
        self.wait([self.input, self.result])


class ArrayKernelTimer(KernelTimer[ArrayDevice]):
    """Times by the host's clock, from an idle device to an idle device."""

    def __init__(self, device: ArrayDevice) -> None:
        super().__init__(device)
        self._on_gpu = device.plan.device == "cuda"
        if self._on_gpu:
            self.chain_length, self.eviction_bytes = GPU_CHAIN, GPU_EVICTION_BYTES

    def copy_input(self) -> DeviceArray:
        return self.device.create_input(self.device.to_host(self.device.input))

    def time_action(self, action: Callable[[], object]) -> ReadSeconds:
        def run() -> None:
            action()
            self.device.finish()

        self.device.finish()
        return super().time_action(run)

    def combine_seconds(self, seconds: Sequence[float]) -> float:
        return max(seconds) if self._on_gpu else sum(seconds)

    @cached_property
    def _eviction(self) -> tuple[DeviceArray, Callable[..., DeviceArray]]:
        values = self.device.create_input(np.zeros(self.eviction_bytes // 4, np.float32))
        return values, self.device.compile(lambda values: values + 1)

    def evict(self) -> None:
        values, write = self._eviction
        self.device.wait([write(values)])

    @cached_property
    def _chain(self) -> Callable[..., DeviceArray]:
        def convolve_repeatedly(images: DeviceArray, filters: DeviceArray) -> DeviceArray:
            for _ in range(self.chain_length):
                images = self.device.convolve(images, filters)
            return images

        return self.device.compile(convolve_repeatedly)

    def iterate(self) -> None:
        self.device.result = self._chain(self.device.input, self.mean_filters)


def same_padding(width: int) -> tuple[int, int]:
    """Return the padding before and after of scipy's ``same``; it differs for even filters."""
    return width // 2, (width - 1) // 2


def run_devices(
    task: ConvTask,
    device_class: type[ArrayDevice],
    peak_memory_bytes: Callable[[], int],
    clock: Clock,
) -> ConvResult:
    """Time every part on all devices; raises Mismatch for a result that differs from scipy's."""
    images = task.problem.make_images(range(task.problem.images))
    host = NumpyHostBuffers.of(images, str(task.plan.layout))
    kind = "pageable" if task.plan.device == "cuda" else ""
    return run_rank(
        task,
        device_class,
        ArrayKernelTimer,
        {kind: host},
        libraries=SCIPY_LIBRARIES,
        first_call_note=FIRST_CALL_NOTE,
        peak_memory_bytes=peak_memory_bytes,
        clock=clock,
    )
