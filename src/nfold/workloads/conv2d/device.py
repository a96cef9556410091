"""The seam between the parts that are timed and the library that computes them.

A lane is one device with its share of this process's images; a host holds the images and the
one buffer of results. Everything a lane is told to do happens inside its ``work()``; it may be
queued, and is over when ``finish()`` returns.
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

# The seconds that something took, to be asked for once the lane has finished
ReadSeconds = Callable[[], float]
DeviceAction = Callable[[], None]  # something that a lane is told to do


class HostBuffers(ABC):
    """This process's images and their results in host memory."""

    @abstractmethod
    def inputs(self, places: Sequence[int]) -> Array:
        """Some images as float32, as this host holds them (rounded to its precision)."""

    @abstractmethod
    def outputs(self, places: Sequence[int]) -> Array:
        """The results of some images as float32."""

    @abstractmethod
    def fill_nan(self) -> None:
        """Fill the results with NaN, so that what is not written again is found."""


H = TypeVar("H", bound=HostBuffers)


class ConvDevice(ABC, Generic[H]):
    """One device. This base is a CPU device: it computes where the images lie, in order."""

    chain_length = 4  # convolutions in one call of the resident loop
    # What is written between calls to empty the cache: several times its size
    eviction_bytes = 128 * 2**20
    # Whether a CPU device too has memory of its own, to which images are copied
    always_copies = False

    @property
    def method(self) -> str:
        """What convolves, where there is a choice."""
        return ""

    def work(self) -> AbstractContextManager[object]:
        """The context in which the lane is told what to do."""
        return nullcontext()

    def finish(self) -> None:
        """Wait for everything that the lane was told to do."""

    def combine_seconds(self, seconds: Sequence[float]) -> float:
        """Lanes' times to the process's: CPU lanes run one after the other."""
        return sum(seconds)

    def time_action(self, action: Callable[[], object]) -> ReadSeconds:
        """Do something and time it by the device's own clock."""
        start = time.monotonic()
        action()
        seconds = time.monotonic() - start
        return lambda: seconds

    def peak_memory_bytes(self) -> int:
        """The most that was held so far: the process's resident memory."""
        return machine.peak_resident_bytes()

    @abstractmethod
    def set_filters(self, filters: Array) -> None:
        """Convolve with these filters from now on."""

    def upload(self, host: H) -> None:
        """Bring this lane's images to the device; a CPU device reads the host's memory."""

    @abstractmethod
    def compute(self) -> None:
        """Convolve the images."""

    @abstractmethod
    def pass_through(self) -> None:
        """Take the images themselves for the results."""

    @abstractmethod
    def download(self, host: H) -> None:
        """Bring the results into their place on the host."""

    def round_trip(self, host: H, copy_only: bool) -> Sequence[DeviceAction]:
        """What to do, in order, from images on the host to results on the host."""
        between = self.compute_action(copy_only)
        return [partial(self.upload, host), between, partial(self.download, host)]

    def compute_action(self, copy_only: bool) -> DeviceAction:
        """What makes results of images that are on the device."""
        return self.pass_through if copy_only else self.compute

    def overlap(self, host: H) -> str:
        """How the steps there and back overlap, where they do."""
        return ""

    @abstractmethod
    def rotate_images(self) -> None:
        """Go on to another copy of the images, which the call before did not touch."""

    @abstractmethod
    def evict(self) -> None:
        """Write ``eviction_bytes`` on the device."""

    @abstractmethod
    def iterate(self) -> None:
        """Convolve ``chain`` times, each time the results of the time before."""

    def cold(self) -> ReadSeconds:
        """One convolution of images and filters that no cache holds."""
        self.rotate_images()
        self.evict()
        return self.time_action(self.compute)

    def warm(self) -> ReadSeconds:
        """One convolution right after the same one.

        The long write before both lets the host run ahead of a GPU, which would otherwise wait
        for the launch, and the launch would be what is timed.
        """
        self.evict()
        self.compute()
        return self.time_action(self.compute)

    def resident(self) -> ReadSeconds:
        """The mean of a chain of convolutions."""
        read = self.time_action(self.iterate)
        return lambda: read() / self.chain_length
