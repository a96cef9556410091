"""The convolution by a library whose arrays are values: TensorFlow, JAX. Imports neither.

The host's images and results are NumPy arrays; what is on a device is made by copying and by
computing, never written to. Such libraries show no clock of a device, so the host's is read after
waiting for the device.
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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
DeviceArray = Any  # an array of the library, on a device

IMAGE_COPIES = 3  # sets of images that take turns, so that no call meets those of the call before
GPU_CHAIN = 50
# Several times the largest cache of a GPU; neither library says how large it is
GPU_EVICTION_BYTES = 512 * 2**20
FIRST_CALL_NOTE = (
    "allocation, copies, tracing and compilation, convolution; the library runs already"
)


@dataclass(frozen=True, kw_only=True)
class NumpyHostBuffers(HostBuffers):
    """Images and results of one process, in the order of axes that the devices compute in."""

    images: Array
    results: Array
    layout: str

    @classmethod
    def of(cls, images: Array, layout: str) -> NumpyHostBuffers:
        """From images [n, c, h, w]."""
        axes = (0, 2, 3, 1) if layout == "channels_last" else (0, 1, 2, 3)
        ordered = np.ascontiguousarray(images.transpose(axes))
        return cls(images=ordered, results=np.empty_like(ordered), layout=layout)

    def inputs(self, places: Sequence[int]) -> Array:
        return self._channels_first(self.images, places)

    def outputs(self, places: Sequence[int]) -> Array:
        return self._channels_first(self.results, places)

    def _channels_first(self, values: Array, places: Sequence[int]) -> Array:
        chosen = values[list(places)]
        return chosen.transpose(0, 3, 1, 2) if self.layout == "channels_last" else chosen

    def fill_nan(self) -> None:
        self.results.fill(np.nan)


@dataclass(frozen=True, kw_only=True)
class DeviceSetup:
    """Where a lane is: its part of the host's images, and what it is told of the plan.

    ``peak`` says the most bytes that the fullest device held so far.
    """

    images: slice
    layout: str
    step: str
    on_gpu: bool
    peak_memory_bytes: Callable[[], int]


class ArrayDevice(ConvDevice[NumpyHostBuffers]):
    """A device of such a library. Copies are explicit on CPU devices too, and are made."""

    always_copies = True

    def __init__(
        self, setup: DeviceSetup, host: NumpyHostBuffers, ones: Array, mean: Array
    ) -> None:
        self.setup, self._mean_filters = setup, mean
        if setup.on_gpu:
            self.chain, self.eviction_bytes = GPU_CHAIN, GPU_EVICTION_BYTES
        with self.work():
            self._convolution = self.compile(self.convolve)
            self._chain = self.compile(self._convolve_chain)
            self.upload(host)
            self.result = self.input
            self.set_filters(ones)

    @abstractmethod
    def to_device(self, values: Array) -> DeviceArray:
        """A copy on the device."""

    @abstractmethod
    def to_host(self, value: DeviceArray) -> Array:
        """The values on the host, valid until the next call; waits for them."""

    @abstractmethod
    def convolve(self, images: DeviceArray, filters: DeviceArray) -> DeviceArray:
        """Correlate images with filters [k, k, in, out], padded as ``padding`` says."""

    @abstractmethod
    def compile(self, function: Callable[..., DeviceArray]) -> Callable[..., DeviceArray]:
        """The function as the plan's step has it run."""

    @abstractmethod
    def wait(self, values: Sequence[DeviceArray]) -> None:
        """Wait until these are computed."""

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
        for _ in range(self.chain):
            images = self.convolve(images, filters)
        return images

    def iterate(self) -> None:
        self.result = self._chain(self.input, self._mean)


def same_padding(width: int) -> tuple[int, int]:
    """Pixels before and after, of scipy's ``same`` for a convolution: an even filter's differ."""
    return width // 2, (width - 1) // 2


def run_devices(
    task: ConvTask[D],
    create_device: Callable[[D, DeviceSetup, NumpyHostBuffers, Array, Array], ArrayDevice],
    peak_memory_bytes: Callable[[], int],
    clock: Clock,
) -> ConvResult:
    """Time every part on the one process of a plan; ``lane`` makes a device's.

    Raises Unsupported for a plan that makes no sense here and Mismatch where a result is not
    scipy's.
    """
    reason = unsupported(task.plan)
    if reason is not None:
        raise Unsupported(reason)
    images = task.problem.make_images(range(task.problem.images))
    host = NumpyHostBuffers.of(images, str(task.plan.layout))
    begin = partial(_create_process, task, create_device, peak_memory_bytes, host, clock)
    process, first = first_call(begin, host, FIRST_CALL_NOTE, clock)
    hosts = {"pageable" if task.plan.device == "cuda" else "": host}
    return measure_rank(task, process, hosts, SCIPY_LIBRARIES, first, clock)


def _create_process(
    task: ConvTask[D],
    lane: Callable[[D, DeviceSetup, NumpyHostBuffers, Array, Array], ArrayDevice],
    peak: Callable[[], int],
    host: NumpyHostBuffers,
    clock: Clock,
) -> ConvProcess[NumpyHostBuffers]:
    plan, problem = task.plan, task.problem
    lanes = []
    for device, share in zip(task.devices, task.device_images, strict=True):
        place = DeviceSetup(
            images=slice(share.start, share.stop),
            layout=host.layout,
            step=str(plan.step),
            on_gpu=plan.device == "cuda",
            peak_memory_bytes=peak,
        )
        lanes.append(lane(device, place, host, problem.ones_filter(), problem.mean_filter()))
    return ConvProcess(
        problem=problem,
        devices=lanes,
        device_images=task.device_images,
        precision=str(plan.precision),
        itemsize=host.images.itemsize,
        clock=clock,
    )
