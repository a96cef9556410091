"""The interface between the timed parts and a library's devices.

A device has a slice of the process's images. All calls happen within its ``work()`` context; they
may be queued, and are complete when ``finish()`` returns.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Generic, TypeVar

from nfold.core import machine
from nfold.workloads.conv2d.problem import Array

ReadSeconds = Callable[[], float]  # the measured seconds; call it after ``finish()``
DeviceAction = Callable[[], None]


class HostBuffers(ABC):
    """The process's images and results in host memory, rounded to the plan's precision."""

    @abstractmethod
    def inputs(self, indices: Sequence[int]) -> Array:
        """Return images as float32."""

    @abstractmethod
    def outputs(self, indices: Sequence[int]) -> Array:
        """Return results as float32."""

    @abstractmethod
    def fill_nan(self) -> None:
        """Fill the results with NaN, to detect values that are not written."""


H = TypeVar("H", bound=HostBuffers)


class ConvDevice(ABC, Generic[H]):
    """One device. The base class is a CPU device that computes in host memory, synchronously."""

    chain_length = 4  # convolutions per call of the resident loop
    eviction_bytes = 128 * 2**20  # written to empty the cache; several times its size
    always_copies = False  # True: CPU devices also have their own memory

    @property
    def method(self) -> str:
        return ""

    def work(self) -> AbstractContextManager[object]:
        """Return the context of all calls."""
        return nullcontext()

    def finish(self) -> None:
        """Wait for all queued calls."""

    def combine_seconds(self, seconds: Sequence[float]) -> float:
        """Combine the times of a process's devices; CPU devices run one after the other."""
        return sum(seconds)

    def time_action(self, action: Callable[[], object]) -> ReadSeconds:
        """Run ``action`` and time it by the device's clock."""
        start = time.monotonic()
        action()
        seconds = time.monotonic() - start
        return lambda: seconds

    def peak_memory_bytes(self) -> int:
        """Return the peak memory so far; on a CPU the process's resident memory."""
        return machine.peak_resident_bytes()

    @abstractmethod
    def set_filters(self, filters: Array) -> None: ...

    def upload(self, host: H) -> None:
        """Copy the images to the device; a CPU device reads host memory."""

    @abstractmethod
    def compute(self) -> None:
        """Convolve the images."""

    @abstractmethod
    def pass_through(self) -> None:
        """Use the images as results."""

    @abstractmethod
    def download(self, host: H) -> None:
        """Copy the results to the host."""

    def round_trip(self, host: H, copy_only: bool) -> Sequence[DeviceAction]:
        """Return the actions from images on the host to results on the host, in order."""
        compute = self.compute_action(copy_only)
        return [partial(self.upload, host), compute, partial(self.download, host)]

    def compute_action(self, copy_only: bool) -> DeviceAction:
        return self.pass_through if copy_only else self.compute

    def overlap(self, host: H) -> str:
        """Describe how the actions of a round trip overlap; empty if they do not."""
        return ""

    @abstractmethod
    def rotate_images(self) -> None:
        """Switch to another copy of the images, which is not in a cache."""

    @abstractmethod
    def evict(self) -> None:
        """Write ``eviction_bytes`` on the device."""

    @abstractmethod
    def iterate(self) -> None:
        """Convolve ``chain_length`` times, each time the previous results."""

    def cold(self) -> ReadSeconds:
        """Time one convolution with cold caches."""
        self.rotate_images()
        self.evict()
        return self.time_action(self.compute)

    def warm(self) -> ReadSeconds:
        """Time one convolution right after the same convolution.

        The long write before lets the host run ahead of a GPU, so that the launch is not timed.
        """
        self.evict()
        self.compute()
        return self.time_action(self.compute)

    def resident(self) -> ReadSeconds:
        """Time the mean of a chain of convolutions."""
        read = self.time_action(self.iterate)
        return lambda: read() / self.chain_length
