"""The timed parts of one process, the verification of results, and other libraries on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import zip_longest
from typing import Generic, TypeVar

import numpy as np
from scipy import ndimage

from nfold.core.measurement import OperationPart, Window
from nfold.core.plan import Plan
from nfold.core.variant import Variant
from nfold.workloads.conv2d.device import ConvDevice, DeviceAction, H, ReadSeconds
from nfold.workloads.conv2d.problem import (
    AnyFloat,
    ConvProblem,
    check_result,
    convolve_image,
    scipy_reference,
    spot_check_indices,
)
from nfold.workloads.conv2d.timing import CallTimer, Clock, TimedCall

NO_COPY_NOTE = "the device computes in host memory: nothing is copied"
HOST_COPY_NOTE = "a copy within host memory: the device needs no copy"


@dataclass(frozen=True, kw_only=True)
class ConvProcess(Generic[H]):
    """The devices of one process; ``device_images`` are the consecutive images of each.

    ``hosts`` are the host buffers by kind: ``pageable`` and ``pinned``, or one with an empty name
    that the devices read in place. The throughput is end to end with the last kind. ``itemsize``
    is in bytes.
    """

    problem: ConvProblem
    devices: Sequence[ConvDevice[H]]
    device_images: Sequence[range]
    precision: str
    itemsize: int
    clock: Clock

    @property
    def one_way_bytes(self) -> int:
        """Bytes of the images of all ranks, or of their results."""
        return self.problem.value_count(self.problem.images) * self.itemsize

    def end_to_end(self, host: H) -> float:
        """Return the seconds from images on the host to results on the host."""
        return self._host_time(lambda device: device.round_trip(host, self.problem.copy_only))

    def copy_only(self, host: H) -> float:
        """Return the seconds of a round trip without convolution."""
        return self._host_time(lambda device: device.round_trip(host, True))

    def _host_time(self, actions: Callable[[ConvDevice[H]], Sequence[DeviceAction]]) -> float:
        start = self.clock()
        for simultaneous in zip_longest(*map(actions, self.devices)):
            for device, action in zip(self.devices, simultaneous, strict=True):
                if action is not None:
                    with device.work():
                        action()
        self._finish()
        return self.clock() - start

    def _device_time(self, action: Callable[[ConvDevice[H]], ReadSeconds]) -> float:
        readings = []
        for device in self.devices:
            with device.work():
                readings.append(action(device))
        self._finish()
        return self.devices[0].combine_seconds([read() for read in readings])

    def _finish(self) -> None:
        for device in self.devices:
            device.finish()

    def timed_calls(self, hosts: Mapping[str, H]) -> list[TimedCall]:
        """Return all timed calls, in order; they leave the results of the convolution."""
        throughput_kind = list(hosts)[-1]
        calls = self._copy_calls(hosts) if self._needs_copies(throughput_kind) else []
        for copy_only in (True,) if self.problem.copy_only else (True, False):
            throughput = throughput_kind if copy_only == self.problem.copy_only else None
            calls += [
                self._round_trip_call(kind, host, copy_only, kind == throughput)
                for kind, host in hosts.items()
            ]
        return calls if self.problem.copy_only else calls + self._kernel_calls()

    def throughput_call(self, hosts: Mapping[str, H], *, resident: bool) -> TimedCall:
        """Return the only timed call of an experiment: a round trip, or compute only."""
        kind, host = list(hosts.items())[-1]
        copy_only = self.problem.copy_only
        if not resident:
            return self._round_trip_call(kind, host, copy_only, True)
        call = partial(self._host_time, lambda device: [device.compute_action(copy_only)])
        return TimedCall(
            name="resident", call=call, bytes=2 * self.one_way_bytes, is_throughput=True
        )

    def _needs_copies(self, kind: str) -> bool:
        return bool(kind) or self.devices[0].always_copies

    def _copy_calls(self, hosts: Mapping[str, H]) -> list[TimedCall]:
        def actions(method: str, host: H, device: ConvDevice[H]) -> list[DeviceAction]:
            return [partial(getattr(device, method), host)]

        return [
            TimedCall(
                name=_with_kind(name, kind),
                call=partial(self._host_time, partial(actions, method, host)),
                bytes=self.one_way_bytes,
            )
            for name, method in (("copy to device", "upload"), ("copy from device", "download"))
            for kind, host in hosts.items()
        ]

    def _round_trip_call(
        self, kind: str, host: H, copy_only: bool, is_throughput: bool
    ) -> TimedCall:
        note = self.devices[0].overlap(host)
        if not self._needs_copies(kind):
            note = HOST_COPY_NOTE if copy_only else NO_COPY_NOTE
        return TimedCall(
            name=_with_kind("copy only" if copy_only else "end to end", kind),
            call=partial(self.copy_only if copy_only else self.end_to_end, host),
            bytes=2 * self.one_way_bytes,
            note=note,
            is_throughput=is_throughput,
        )

    def _kernel_calls(self) -> list[TimedCall]:
        device = self.devices[0]
        moved_bytes = 2 * self.problem.value_count(len(self.device_images[0])) * self.itemsize
        by = f", by {device.method}" if device.method else ""
        size = f"{moved_bytes / 1e6:.1f} MB per device{by}"

        def call(name: str, action: Callable[[ConvDevice[H]], ReadSeconds], note: str) -> TimedCall:
            seconds = partial(self._device_time, action)
            return TimedCall(name=name, call=seconds, bytes=2 * self.one_way_bytes, note=note)

        cold = f"{size}, after writing {device.eviction_bytes / 1e6:.0f} MB"
        chain = f"mean of a chain of {device.chain_length}, each with the previous results{by}"
        return [
            call("convolution, cold cache", lambda device: device.cold(), cold),
            call("convolution, warm cache", lambda device: device.warm(), size),
            call("resident loop", lambda device: device.resident(), chain),
        ]

    def verify(self, hosts: Mapping[str, H]) -> AnyFloat:
        """Compare the results for every kind of host buffers with scipy; raises Mismatch.

        Uses random filters, which detect a flip or a shift, and then ones. Returns the reference
        for ones, which the devices and results are left with.
        """
        inputs = next(iter(hosts.values())).inputs(self._checked_indices())
        for filters in (self.problem.random_filter(), self.problem.ones_filter()):
            for device in self.devices:
                with device.work():
                    device.set_filters(filters)
            expected = inputs if self.problem.copy_only else scipy_reference(inputs, filters)
            for host in hosts.values():
                host.fill_nan()
                self.end_to_end(host)
                self.compare(host, expected)
        return expected

    def compare(self, host: H, expected: AnyFloat) -> None:
        indices, first = self._checked_indices(), self.device_images[0].start
        images = [first + index for index in indices]
        check_result(host.outputs(indices), expected, images, self.precision)

    def _checked_indices(self) -> list[int]:
        first = self.device_images[0].start
        return [
            images[index] - first
            for images in self.device_images
            for index in spot_check_indices(len(images))
        ]

    def peak_memory_bytes(self) -> int:
        return max(device.peak_memory_bytes() for device in self.devices)


def _with_kind(name: str, kind: str) -> str:
    return f"{name}, {kind}" if kind else name


REPEATS = 3
CALL_LIMIT_S = 2.0  # a slower library gets fewer images
TRIAL_IMAGES = 4

Convolve = Callable[[AnyFloat, AnyFloat], AnyFloat]


@dataclass(frozen=True, kw_only=True)
class LibraryConvolution:
    """A library's convolution of images [n, c, h, w] with filters [c, c, k, k] on the CPU."""

    name: str
    convolve: Convolve


def convolve_scipy_signal(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
    """``scipy.signal.convolve2d(mode="same")``, image by image in a Python loop."""
    return np.stack([convolve_image(image, filters) for image in images])


def convolve_scipy_ndimage(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
    """``scipy.ndimage.convolve(mode="constant")``, image by image in a Python loop."""
    origin = -1 if filters.shape[-1] % 2 == 0 else 0

    def convolve(x: AnyFloat, f: AnyFloat) -> AnyFloat:
        result: AnyFloat = ndimage.convolve(x, f, mode="constant", origin=origin)
        return result

    return np.stack(
        [
            np.stack([reduce(np.add, map(convolve, image, channel)) for channel in filters])
            for image in images
        ]
    )


SCIPY_LIBRARIES = (
    LibraryConvolution(name="scipy.signal.convolve2d, 1 core", convolve=convolve_scipy_signal),
    LibraryConvolution(name="scipy.ndimage.convolve, 1 core", convolve=convolve_scipy_ndimage),
)


def measure_library(
    library: LibraryConvolution, problem: ConvProblem, clock: Clock
) -> OperationPart:
    """Time a library on the whole batch, or on as many images as CALL_LIMIT_S allows."""
    filters = problem.ones_filter()

    def time_call(images: AnyFloat) -> float:
        start = clock()
        library.convolve(images, filters)
        return clock() - start

    images = problem.make_images(range(min(TRIAL_IMAGES, problem.images)))
    library.convolve(images, filters)
    count = images_within_limit(time_call(images) / len(images), problem.images)
    images = problem.make_images(range(count))
    return OperationPart(
        name=library.name,
        seconds=tuple(time_call(images) for _ in range(REPEATS)),
        images=count,
        bytes=2 * images.nbytes,
        baseline=True,
        note="" if count == problem.images else f"on {count} of {problem.images} images",
    )


def images_within_limit(seconds_per_image: float, images: int) -> int:
    """Return how many of ``images`` images take at most CALL_LIMIT_S; at least 1."""
    if seconds_per_image * images <= CALL_LIMIT_S:
        return images
    return max(1, int(CALL_LIMIT_S / seconds_per_image))


D = TypeVar("D")


@dataclass(frozen=True, kw_only=True)
class ConvTask(Generic[D]):
    """The task of one rank, with a complete plan and all parameters.

    ``devices`` are driven by this process, the same number on every rank. ``barrier`` waits for
    all ranks; ``beat`` takes (calls done, calls planned). Under an experiment's ``variant`` only
    the throughput is timed.
    """

    parameters: Mapping[str, int]
    plan: Plan
    rank: int
    world_size: int
    devices: Sequence[D]
    barrier: Callable[[], None]
    beat: Callable[[int, int], None]
    variant: Variant = field(default_factory=Variant)

    @property
    def problem(self) -> ConvProblem:
        return ConvProblem.of(self.parameters, self.plan)

    @property
    def device_images(self) -> list[range]:
        return self.problem.images_of_rank(self.rank, self.world_size, len(self.devices))

    @property
    def cores(self) -> int:
        """The cores of this process, at most the plan's, because a mask does not show a quota."""
        planned = (self.plan.cores_per_device or 1) * (self.plan.devices or 1)
        return min(len(os.sched_getaffinity(0)), planned)


@dataclass(frozen=True, kw_only=True)
class ConvResult:
    """The measurements of one rank, with the field names of ``RankSamples``.

    ``peak_memory_bytes`` is after the verification, before the cold-cache calls allocate buffers:
    of the library's allocator on the device that used most, or of the process on a CPU.
    """

    parts: tuple[OperationPart, ...]
    windows: tuple[Window, ...]
    first_step_ms: float
    peak_memory_bytes: int


def first_call(
    create_process: Callable[[], ConvProcess[H]], host: H, note: str, clock: Clock
) -> tuple[ConvProcess[H], OperationPart]:
    """Create a process and time it until its first results are on the host."""
    start = clock()
    process = create_process()
    process.end_to_end(host)
    part = OperationPart(
        name="first call",
        seconds=(clock() - start,),
        images=process.problem.images,
        bytes=2 * process.one_way_bytes,
        note=note,
    )
    return process, part


def measure_rank(
    task: ConvTask[D],
    process: ConvProcess[H],
    hosts: Mapping[str, H],
    libraries: Sequence[LibraryConvolution],
    first_part: OperationPart,
    clock: Clock,
) -> ConvResult:
    """Verify, time every part, verify the results again, then time ``libraries`` on rank 0."""
    expected = process.verify(hosts)
    peak = process.peak_memory_bytes()
    if task.variant:
        calls = [process.throughput_call(hosts, resident=task.variant.input == "resident")]
    else:
        calls = process.timed_calls(hosts)
    assert task.plan.steps is not None
    timer = CallTimer(
        images=task.problem.images,
        rank_images=sum(map(len, task.device_images)),
        warmup=task.plan.warmup_steps or 0,
        steps=task.plan.steps,
        clock=clock,
        barrier=task.barrier,
        beat=task.beat,
    )
    parts, windows = timer.run(calls)
    for host in hosts.values():
        process.compare(host, expected)
    library_parts = []
    for library in () if process.problem.copy_only or task.variant else libraries:
        if task.rank == 0:
            library_parts.append(measure_library(library, task.problem, clock))
        task.barrier()
        total = task.plan.steps * len(calls)
        task.beat(total, total)
    return ConvResult(
        parts=(first_part, *parts, *library_parts),
        windows=windows,
        first_step_ms=1e3 * first_part.seconds[0],
        peak_memory_bytes=peak,
    )
