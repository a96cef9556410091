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

from nfold.errors import Unsupported
from nfold.workloads.conv2d import unsupported
from nfold.workloads.conv2d.baselines import SCIPY
from nfold.workloads.conv2d.lane import Host, Lane, Reading
from nfold.workloads.conv2d.problem import Array, to_correlation
from nfold.workloads.conv2d.process import Process
from nfold.workloads.conv2d.rank import ConvResult, ConvTask, first_call, measure_rank
from nfold.workloads.conv2d.sampling import Clock

D = TypeVar("D")
Value = Any
"""An array of the library, on a device."""

ROTATION = 3
"""Sets of images that take turns, so that no call meets those of the call before."""
GPU_CHAIN = 50
GPU_EVICTION_BYTES = 512 * 2**20
"""Several times the largest cache of a GPU; neither library says how large it is."""
FIRST_CALL = "allocation, copies, tracing and compilation, convolution; the library runs already"


@dataclass(frozen=True, kw_only=True)
class NumpyHost(Host):
    """Images and results of one process, in the order of axes that the devices compute in."""

    images: Array
    results: Array
    layout: str

    @classmethod
    def of(cls, images: Array, layout: str) -> NumpyHost:
        """From images [n, c, h, w]."""
        axes = (0, 2, 3, 1) if layout == "channels_last" else (0, 1, 2, 3)
        ordered = np.ascontiguousarray(images.transpose(axes))
        return cls(images=ordered, results=np.empty_like(ordered), layout=layout)

    def inputs(self, places: Sequence[int]) -> Array:
        """Some images [n, c, h, w]."""
        return self._first(self.images, places)

    def outputs(self, places: Sequence[int]) -> Array:
        """Some results [n, c, h, w]."""
        return self._first(self.results, places)

    def _first(self, values: Array, places: Sequence[int]) -> Array:
        chosen = values[list(places)]
        return chosen.transpose(0, 3, 1, 2) if self.layout == "channels_last" else chosen

    def wipe(self) -> None:
        """Fill the results with NaN."""
        self.results.fill(np.nan)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a lane is: its part of the host's images, and what it is told of the plan.

    ``peak`` says the most bytes that the fullest device held so far.
    """

    images: slice
    layout: str
    step: str
    on_gpu: bool
    peak: Callable[[], int]


class ValueLane(Lane[NumpyHost]):
    """A device of such a library. Copies are explicit on CPU devices too, and are made."""

    copies = True

    def __init__(self, place: Place, host: NumpyHost, ones: Array, mean: Array) -> None:
        self.place, self._mean_filters = place, mean
        if place.on_gpu:
            self.chain, self.eviction_bytes = GPU_CHAIN, GPU_EVICTION_BYTES
        with self.work():
            self._convolution = self.program(self.convolve)
            self._chain = self.program(self._in_a_row)
            self.upload(host)
            self.result = self.input
            self.use(ones)

    @abstractmethod
    def put(self, values: Array) -> Value:
        """A copy on the device."""

    @abstractmethod
    def take(self, value: Value) -> Array:
        """The values on the host, valid until the next call; waits for them."""

    @abstractmethod
    def convolve(self, images: Value, filters: Value) -> Value:
        """Correlate images with filters [k, k, in, out], padded as ``padding`` says."""

    @abstractmethod
    def program(self, function: Callable[..., Value]) -> Callable[..., Value]:
        """The function as the plan's step has it run."""

    @abstractmethod
    def wait(self, values: Sequence[Value]) -> None:
        """Wait until these are computed."""

    def use(self, filters: Array) -> None:
        """Convolve with these filters from now on."""
        self.filters = self._on_device(filters)

    def _on_device(self, filters: Array) -> Value:
        return self.put(np.ascontiguousarray(to_correlation(filters).transpose(2, 3, 1, 0)))

    def upload(self, host: NumpyHost) -> None:
        """Copy this lane's images to the device."""
        self.input = self.put(host.images[self.place.images])

    def compute(self) -> None:
        """Convolve the images."""
        self.result = self._convolution(self.input, self.filters)

    def skip(self) -> None:
        """Take the images themselves for the results."""
        self.result = self.input

    def download(self, host: NumpyHost) -> None:
        """Copy the results into their place in the host's buffer."""
        host.results[self.place.images] = self.take(self.result)

    def finish(self) -> None:
        """Wait for the newest images and results."""
        self.wait([self.input, self.result])

    def timed(self, action: Callable[[], object]) -> Reading:
        """From an idle device until it is idle again, by the host's clock."""
        self.finish()
        start = time.monotonic()
        action()
        self.finish()
        seconds = time.monotonic() - start
        return lambda: seconds

    def together(self, seconds: Sequence[float]) -> float:
        """GPUs run at the same time; CPU devices share one pool of threads."""
        return max(seconds) if self.place.on_gpu else sum(seconds)

    def peak_memory_bytes(self) -> int:
        """The most that the fullest device held so far."""
        return self.place.peak()

    @cached_property
    def _rotation(self) -> Iterator[Value]:
        images = self.take(self.input)
        return itertools.cycle([self.input, *(self.put(images) for _ in range(ROTATION - 1))])

    def turn(self) -> None:
        """Go on to another copy of the images."""
        self.input = next(self._rotation)

    @cached_property
    def _eviction(self) -> tuple[Value, Callable[..., Value]]:
        values = self.put(np.zeros(self.eviction_bytes // 4, np.float32))
        return values, self.program(lambda values: values + 1)

    def evict(self) -> None:
        """Read and write over the cache, to the end."""
        values, write = self._eviction
        self.wait([write(values)])

    @cached_property
    def _mean(self) -> Value:
        return self._on_device(self._mean_filters)

    def _in_a_row(self, images: Value, filters: Value) -> Value:
        for _ in range(self.chain):
            images = self.convolve(images, filters)
        return images

    def iterate(self) -> None:
        """Convolve in a chain, with filters that keep it finite: one program."""
        self.result = self._chain(self.input, self._mean)


def padding(width: int) -> tuple[int, int]:
    """Pixels before and after, of scipy's ``same`` for a convolution: an even filter's differ."""
    return width // 2, (width - 1) // 2


def run_lanes(
    task: ConvTask[D],
    lane: Callable[[D, Place, NumpyHost, Array, Array], ValueLane],
    peak: Callable[[], int],
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
    host = NumpyHost.of(images, str(task.plan.layout))
    begin = partial(_process, task, lane, peak, host, clock)
    process, first = first_call(begin, host, FIRST_CALL, clock)
    hosts = {"pageable" if task.plan.device == "cuda" else "": host}
    return measure_rank(task, process, hosts, SCIPY, first, clock)


def _process(
    task: ConvTask[D],
    lane: Callable[[D, Place, NumpyHost, Array, Array], ValueLane],
    peak: Callable[[], int],
    host: NumpyHost,
    clock: Clock,
) -> Process[NumpyHost]:
    plan, problem = task.plan, task.problem
    lanes = []
    for device, share in zip(task.devices, task.shares, strict=True):
        place = Place(
            images=slice(share.start, share.stop),
            layout=host.layout,
            step=str(plan.step),
            on_gpu=plan.device == "cuda",
            peak=peak,
        )
        lanes.append(lane(device, place, host, problem.ones(), problem.mean()))
    return Process(
        problem=problem,
        lanes=lanes,
        shares=task.shares,
        precision=str(plan.precision),
        itemsize=host.images.itemsize,
        clock=clock,
    )
