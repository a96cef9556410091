"""The convolution by a library with immutable arrays: TensorFlow or JAX. Imports neither.

Images and results on the host are NumPy arrays. These libraries have no device clock: the host's
clock is read after waiting for the device.
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from nfold.core.errors import Unsupported
from nfold.workloads.conv2d import unsupported
from nfold.workloads.conv2d.device import ConvDevice, HostBuffers, ReadSeconds
from nfold.workloads.conv2d.problem import Array, to_correlation
from nfold.workloads.conv2d.process import (
    SCIPY_LIBRARIES,
    ConvProcess,
    ConvResult,
    ConvTask,
    first_call,
    measure_rank,
)
from nfold.workloads.conv2d.timing import Clock

D = TypeVar("D")
DeviceArray = Any
IMAGE_COPIES = 3  # rotated, so that a call does not find its images in a cache
GPU_CHAIN = 50
GPU_EVICTION_BYTES = 512 * 2**20  # several times the largest cache of a GPU
FIRST_CALL_NOTE = (
    "allocation, copies, tracing and compilation, convolution; the library runs already"
)


@dataclass(frozen=True, kw_only=True)
class NumpyHostBuffers(HostBuffers):
    """Images and results of one process in the plan's layout."""

    images: Array
    results: Array
    layout: str

    @classmethod
    def of(cls, images: Array, layout: str) -> NumpyHostBuffers:
        axes = (0, 2, 3, 1) if layout == "channels_last" else (0, 1, 2, 3)
        ordered = np.ascontiguousarray(images.transpose(axes))
        return cls(images=ordered, results=np.empty_like(ordered), layout=layout)

    def inputs(self, indices: Sequence[int]) -> Array:
        return self._channels_first(self.images[list(indices)])

    def outputs(self, indices: Sequence[int]) -> Array:
        return self._channels_first(self.results[list(indices)])

    def _channels_first(self, values: Array) -> Array:
        return values.transpose(0, 3, 1, 2) if self.layout == "channels_last" else values

    def fill_nan(self) -> None:
        self.results.fill(np.nan)


@dataclass(frozen=True, kw_only=True)
class DeviceSetup:
    """A device, its slice of the host's images and its part of the plan."""

    device: Any
    images: slice
    layout: str
    step: str
    on_gpu: bool
    peak_memory_bytes: Callable[[], int]


class ArrayDevice(ConvDevice[NumpyHostBuffers]):
    """A device of TensorFlow or JAX. Copies to and from CPU devices are explicit, too."""

    always_copies = True

    def __init__(
        self, setup: DeviceSetup, host: NumpyHostBuffers, ones: Array, mean: Array
    ) -> None:
        self.setup, self._mean_filters = setup, mean
        if setup.on_gpu:
            self.chain_length, self.eviction_bytes = GPU_CHAIN, GPU_EVICTION_BYTES
        with self.work():
            self._convolution = self.compile(self.convolve)
            self._chain = self.compile(self._convolve_chain)
            self.upload(host)
            self.result = self.input
            self.set_filters(ones)

    @abstractmethod
    def to_device(self, values: Array) -> DeviceArray: ...

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

    def set_filters(self, filters: Array) -> None:
        self.filters = self._on_device(filters)

    def _on_device(self, filters: Array) -> DeviceArray:
        return self.to_device(np.ascontiguousarray(to_correlation(filters).transpose(2, 3, 1, 0)))

    def upload(self, host: NumpyHostBuffers) -> None:
        self.input = self.to_device(host.images[self.setup.images])

    def compute(self) -> None:
        self.result = self._convolution(self.input, self.filters)

    def pass_through(self) -> None:
        self.result = self.input

    def download(self, host: NumpyHostBuffers) -> None:
        host.results[self.setup.images] = self.to_host(self.result)

    def finish(self) -> None:
        self.wait([self.input, self.result])

    def time_action(self, action: Callable[[], object]) -> ReadSeconds:
        self.finish()
        start = time.monotonic()
        action()
        self.finish()
        seconds = time.monotonic() - start
        return lambda: seconds

    def combine_seconds(self, seconds: Sequence[float]) -> float:
        return max(seconds) if self.setup.on_gpu else sum(seconds)

    def peak_memory_bytes(self) -> int:
        return self.setup.peak_memory_bytes()

    @cached_property
    def _rotation(self) -> Iterator[DeviceArray]:
        images = self.to_host(self.input)
        return itertools.cycle(
            [self.input, *(self.to_device(images) for _ in range(IMAGE_COPIES - 1))]
        )

    def rotate_images(self) -> None:
        self.input = next(self._rotation)

    @cached_property
    def _eviction(self) -> tuple[DeviceArray, Callable[..., DeviceArray]]:
        values = self.to_device(np.zeros(self.eviction_bytes // 4, np.float32))
        return values, self.compile(lambda values: values + 1)

    def evict(self) -> None:
        values, write = self._eviction
        self.wait([write(values)])

    @cached_property
    def _mean(self) -> DeviceArray:
        return self._on_device(self._mean_filters)

    def _convolve_chain(self, images: DeviceArray, filters: DeviceArray) -> DeviceArray:
        for _ in range(self.chain_length):
            images = self.convolve(images, filters)
        return images

    def iterate(self) -> None:
        self.result = self._chain(self.input, self._mean)


def same_padding(width: int) -> tuple[int, int]:
    """Return the padding before and after of scipy's ``same``; it differs for even filters."""
    return width // 2, (width - 1) // 2


def run_devices(
    task: ConvTask[D],
    create_device: Callable[[DeviceSetup, NumpyHostBuffers, Array, Array], ArrayDevice],
    peak_memory_bytes: Callable[[], int],
    clock: Clock,
) -> ConvResult:
    """Time every part on all devices in one process.

    Raises Unsupported for an impossible plan and Mismatch for a result that differs from scipy's.
    """
    reason = unsupported(task.plan)
    if reason is not None:
        raise Unsupported(reason)
    plan, problem = task.plan, task.problem
    images = problem.make_images(range(problem.images))
    host = NumpyHostBuffers.of(images, str(plan.layout))

    def create_process() -> ConvProcess[NumpyHostBuffers]:
        devices = []
        for device, share in zip(task.devices, task.device_images, strict=True):
            setup = DeviceSetup(
                device=device,
                images=slice(share.start, share.stop),
                layout=host.layout,
                step=str(plan.step),
                on_gpu=plan.device == "cuda",
                peak_memory_bytes=peak_memory_bytes,
            )
            filters = problem.ones_filter(), problem.mean_filter()
            devices.append(create_device(setup, host, *filters))
        return ConvProcess(
            problem=problem,
            devices=devices,
            device_images=task.device_images,
            precision=str(plan.precision),
            itemsize=host.images.itemsize,
            clock=clock,
        )

    process, first = first_call(create_process, host, FIRST_CALL_NOTE, clock)
    hosts = {"pageable" if plan.device == "cuda" else "": host}
    return measure_rank(task, process, hosts, SCIPY_LIBRARIES, first, clock)
