"""The interface between the timed parts and a library's devices.

A ``ConvDevice`` holds the arrays, copies and convolves. A ``KernelTimer`` times its convolutions
without copies. All calls of both happen within the ``work()`` context of the device; they may be
queued, and are complete when ``finish()`` returns.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

from nfold.workloads.conv2d.problem import Array, ConvTask, to_correlation

ReadSeconds = Callable[[], float]  # the measured seconds; call it after ``finish()``
DeviceAction = Callable[[], None]
IMAGE_COPIES = 3  # rotated, so that a call does not find its images in a cache


@dataclass(frozen=True, kw_only=True)
class HostBuffers(ABC):
    """A process's images and results in host memory, in the plan's precision and layout."""

    images: Any
    results: Any
    in_place: bool = False  # the device reads the images where they are

    @abstractmethod
    def to_float32(self, values: Any, indices: Sequence[int]) -> Array:
        """Return some of the images or results as float32 [n, channels, height, width]."""

    @abstractmethod
    def fill_nan(self) -> None:
        """Fill the results with NaN, to detect values that are not written."""


H = TypeVar("H", bound=HostBuffers)


class ConvDevice(ABC, Generic[H]):
    """One device, which convolves ``image_slice`` of the host's images.

    The base class is a CPU device that computes in host memory, synchronously.
    """

    def __init__(self, task: ConvTask, index: int, host: H) -> None:
        first, share = task.device_images[0].start, task.device_images[index]
        self.plan, self.problem, self.device = task.plan, task.problem, task.devices[index]
        self.image_slice = slice(share.start - first, share.stop - first)
        with self.work():
            self.input = self.result = self.create_input(host.images[self.image_slice])
            self.set_filters(self.problem.ones_filter())

    @property
    def method(self) -> str:
        return ""

    def work(self) -> AbstractContextManager[object]:
        """Return the context of all calls."""
        return nullcontext()

    def finish(self) -> None:
        """Wait for all queued calls."""

    @abstractmethod
    def create_input(self, images: Any) -> Any:
        """Return the device's array for these images, which ``upload`` may still have to copy."""

    @abstractmethod
    def create_filters(self, filters: Array) -> Any:
        """Copy filters [out, in, k, k], flipped for a correlation, to the device."""

    def set_filters(self, filters: Array) -> None:
        self.filters = self.create_filters(to_correlation(filters))

    def upload(self, host: H) -> None:
        """Copy the images to the device; a CPU device reads host memory."""

    @abstractmethod
    def compute(self) -> None:
        """Convolve the images."""

    def pass_through(self) -> None:
        """Use the images as results."""
        self.result = self.input

    @abstractmethod
    def download(self, host: H) -> None:
        """Copy the results to the host."""

    def round_trip(self, host: H, copy_only: bool) -> Sequence[DeviceAction]:
        """Return the actions from images on the host to results on the host, in order."""
        compute = self.pass_through if copy_only else self.compute
        return [partial(self.upload, host), compute, partial(self.download, host)]

    def overlap(self, host: H) -> str:
        """Describe how the actions of a round trip overlap; empty if they do not."""
        return ""


D = TypeVar("D", bound=ConvDevice[Any])


class KernelTimer(ABC, Generic[D]):
    """Times the convolutions of one device, without copies.

    The base class is for a CPU device, which computes synchronously.
    """

    chain_length = 4  # convolutions per call of the resident loop
    eviction_bytes = 128 * 2**20  # written to empty the cache; several times its size

    def __init__(self, device: D) -> None:
        self.device = device

    def combine_seconds(self, seconds: Sequence[float]) -> float:
        """Combine the times of a process's devices; CPU devices run one after the other."""
        return sum(seconds)

    def time_action(self, action: Callable[[], object]) -> ReadSeconds:
        """Run ``action`` and time it by the device's clock."""
        start = time.monotonic()
        action()
        seconds = time.monotonic() - start
        return lambda: seconds

    @cached_property
    def mean_filters(self) -> Any:
        return self.device.create_filters(to_correlation(self.device.problem.mean_filter()))

    @abstractmethod
    def copy_input(self) -> Any:
        """Return a copy of the device's images."""

    @cached_property
    def _rotation(self) -> Iterator[Any]:
        copies = (self.copy_input() for _ in range(IMAGE_COPIES - 1))
        return itertools.cycle([self.device.input, *copies])

    def rotate_images(self) -> None:
        """Switch to another copy of the images, which is not in a cache."""
        self.device.input = next(self._rotation)

    @abstractmethod
    def evict(self) -> None:
        """Write ``eviction_bytes`` on the device."""

    @abstractmethod
    def iterate(self) -> None:
        """Convolve ``chain_length`` times with the mean filters, each time the last results."""

    def cold(self) -> ReadSeconds:
        """Time one convolution with cold caches."""
        self.rotate_images()
        self.evict()
        return self.time_action(self.device.compute)

    def warm(self) -> ReadSeconds:
        """Time one convolution right after the same convolution.

        The long write before lets the host run ahead of a GPU, so that the launch is not timed.
        """
        self.evict()
        self.device.compute()
        return self.time_action(self.device.compute)

    def resident(self) -> ReadSeconds:
        """Time the mean of a chain of convolutions."""
        read = self.time_action(self.iterate)
        return lambda: read() / self.chain_length
