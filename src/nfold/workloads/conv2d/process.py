"""What one process times on its lanes, and how it makes sure that the results are right."""

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
    Array,
    ConvProblem,
    check_result,
    convolve_image,
    scipy_reference,
    spot_check_indices,
)
from nfold.workloads.conv2d.timing import CallTimer, Clock, TimedCall

NO_COPY_NOTE = "the device computes where the images lie: nothing is copied to it or from it"
HOST_COPY_NOTE = "a plain copy in host memory: the device needs none"


@dataclass(frozen=True, kw_only=True)
class ConvProcess(Generic[H]):
    """The lanes of one process; ``shares`` are the images of each, consecutive.

    Hosts come by kind: ``pageable`` and ``pinned``, or one without a kind that the lanes read in
    place. The last one's way end to end is the measurement's throughput. ``itemsize`` is the
    bytes of a value.
    """

    problem: ConvProblem
    devices: Sequence[ConvDevice[H]]
    device_images: Sequence[range]
    precision: str
    itemsize: int
    clock: Clock

    @property
    def one_way_bytes(self) -> int:
        """The images of all ranks; the results are as many."""
        return self.problem.value_count(self.problem.images) * self.itemsize

    def end_to_end(self, host: H) -> float:
        """Seconds from images on the host to results on the host."""
        return self._round_trip_seconds(host, self.problem.copy_only)

    def copy_only(self, host: H) -> float:
        """Seconds there and back, nothing convolved."""
        return self._round_trip_seconds(host, True)

    def _round_trip_seconds(self, host: H, copy_only: bool) -> float:
        return self._host_time(lambda lane: lane.round_trip(host, copy_only))

    def _host_time(self, steps: Callable[[ConvDevice[H]], Sequence[DeviceAction]]) -> float:
        start = self.clock()
        for turn in zip_longest(*map(steps, self.devices)):
            for lane, step in zip(self.devices, turn, strict=True):
                if step is not None:
                    with lane.work():
                        step()
        self._finish()
        return self.clock() - start

    def _device_time(self, action: Callable[[ConvDevice[H]], ReadSeconds]) -> float:
        readings = []
        for lane in self.devices:
            with lane.work():
                readings.append(action(lane))
        self._finish()
        return self.devices[0].combine_seconds([read() for read in readings])

    def _finish(self) -> None:
        for lane in self.devices:
            lane.finish()

    def timed_calls(self, hosts: Mapping[str, H]) -> list[TimedCall]:
        """Everything to time, in order; the results that it leaves are the convolution's."""
        last = list(hosts)[-1]
        found = self._copy_calls(hosts) if self._needs_copies(last) else []
        found += [self._copy_only(kind, hosts, kind == last) for kind in hosts]
        if self.problem.copy_only:
            return found
        found += [self._end_to_end(kind, hosts, kind == last) for kind in hosts]
        return found + self._kernels()

    def throughput_call(self, hosts: Mapping[str, H], *, resident: bool) -> TimedCall:
        """The one probe of an experiment: end to end, or from images to results on the devices."""
        kind = list(hosts)[-1]
        if not resident:
            whole = self._copy_only if self.problem.copy_only else self._end_to_end
            return whole(kind, hosts, True)
        call = partial(self._host_time, lambda lane: [lane.compute_action(self.problem.copy_only)])
        return TimedCall(
            name="resident", call=call, bytes=2 * self.one_way_bytes, is_throughput=True
        )

    def _needs_copies(self, kind: str) -> bool:
        return bool(kind) or self.devices[0].always_copies

    def _copy_calls(self, hosts: Mapping[str, H]) -> list[TimedCall]:
        there = [self._upload(kind, host) for kind, host in hosts.items()]
        return there + [self._download(kind, host) for kind, host in hosts.items()]

    def _upload(self, kind: str, host: H) -> TimedCall:
        call = partial(self._host_time, lambda lane: [partial(lane.upload, host)])
        return TimedCall(
            name=_with_kind("copy to device", kind), call=call, bytes=self.one_way_bytes
        )

    def _download(self, kind: str, host: H) -> TimedCall:
        call = partial(self._host_time, lambda lane: [partial(lane.download, host)])
        return TimedCall(
            name=_with_kind("copy from device", kind), call=call, bytes=self.one_way_bytes
        )

    def _copy_only(self, kind: str, hosts: Mapping[str, H], last: bool) -> TimedCall:
        return TimedCall(
            name=_with_kind("copy only", kind),
            call=partial(self.copy_only, hosts[kind]),
            bytes=2 * self.one_way_bytes,
            note=self.devices[0].overlap(hosts[kind])
            if self._needs_copies(kind)
            else HOST_COPY_NOTE,
            is_throughput=last and self.problem.copy_only,
        )

    def _end_to_end(self, kind: str, hosts: Mapping[str, H], last: bool) -> TimedCall:
        return TimedCall(
            name=_with_kind("end to end", kind),
            call=partial(self.end_to_end, hosts[kind]),
            bytes=2 * self.one_way_bytes,
            note=self.devices[0].overlap(hosts[kind]) if self._needs_copies(kind) else NO_COPY_NOTE,
            is_throughput=last,
        )

    def _kernels(self) -> list[TimedCall]:
        lane = self.devices[0]
        moved = 2 * self.problem.value_count(len(self.device_images[0])) * self.itemsize
        by = f", by {lane.method}" if lane.method else ""
        size = f"{moved / 1e6:.1f} MB a device{by}"
        cold = f"{size}, after writing {lane.eviction_bytes / 1e6:.0f} MB"
        chain = f"mean of {lane.chain_length} in a row, each of the results of the one before{by}"
        return [
            self._kernel("convolution, cold cache", lambda lane: lane.cold(), cold),
            self._kernel("convolution, warm cache", lambda lane: lane.warm(), size),
            self._kernel("resident loop", lambda lane: lane.resident(), chain),
        ]

    def _kernel(
        self, name: str, action: Callable[[ConvDevice[H]], ReadSeconds], note: str
    ) -> TimedCall:
        call = partial(self._device_time, action)
        return TimedCall(name=name, call=call, bytes=2 * self.one_way_bytes, note=note)

    def verify(self, hosts: Mapping[str, H]) -> AnyFloat:
        """Compare every way through the devices with scipy, with random filters and with ones.

        Raises Mismatch. Random filters find a flip or a shift that ones would hide. Afterwards
        the filters are ones, every host's results are theirs, and so is the returned reference.
        """
        for filters in (self.problem.random_filter(), self.problem.ones_filter()):
            self._set_filters(filters)
            expected = self._reference(next(iter(hosts.values())), filters)
            for host in hosts.values():
                host.fill_nan()
                self.end_to_end(host)
                self.compare(host, expected)
        return expected

    def compare(self, host: H, expected: AnyFloat) -> None:
        """Compare a handful of the host's results, from every lane; raises Mismatch."""
        check_result(
            host.outputs(self._checked_indices()), expected, self._checked_images(), self.precision
        )

    def _reference(self, host: H, filters: Array) -> AnyFloat:
        inputs = host.inputs(self._checked_indices())
        return inputs if self.problem.copy_only else scipy_reference(inputs, filters)

    def _checked_images(self) -> list[int]:
        return [
            share[place] for share in self.device_images for place in spot_check_indices(len(share))
        ]

    def _checked_indices(self) -> list[int]:
        return [image - self.device_images[0].start for image in self._checked_images()]

    def _set_filters(self, filters: Array) -> None:
        for lane in self.devices:
            with lane.work():
                lane.set_filters(filters)

    def peak_memory_bytes(self) -> int:
        """The most that the fullest lane held so far."""
        return max(lane.peak_memory_bytes() for lane in self.devices)


def _with_kind(name: str, kind: str) -> str:
    return f"{name}, {kind}" if kind else name


REPEATS = 3
# Longer than this no call should take: then it gets fewer images, and the part says so
CALL_LIMIT_S = 2.0
TRIAL_IMAGES = 4

Convolve = Callable[[AnyFloat, AnyFloat], AnyFloat]


@dataclass(frozen=True, kw_only=True)
class LibraryConvolution:
    """A way to convolve images [n, c, h, w] with filters [c, c, k, k] without the devices."""

    name: str
    convolve: Convolve


def convolve_scipy_signal(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
    """``scipy.signal.convolve2d(mode="same")``, image by image in a Python loop."""
    return np.stack([convolve_image(image, filters) for image in images])


def convolve_scipy_ndimage(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
    """``scipy.ndimage.convolve(mode="constant")``, image by image in a Python loop."""
    return np.stack([_ndimage_image(image, filters) for image in images])


def _ndimage_image(image: AnyFloat, filters: AnyFloat) -> AnyFloat:
    origin = -1 if filters.shape[-1] % 2 == 0 else 0

    def one(x: AnyFloat, f: AnyFloat) -> AnyFloat:
        made: AnyFloat = ndimage.convolve(x, f, mode="constant", origin=origin)
        return made

    sums = [reduce(np.add, map(one, image, per_channel)) for per_channel in filters]
    return np.stack(sums)


SCIPY_LIBRARIES = (
    LibraryConvolution(name="scipy.signal.convolve2d, 1 core", convolve=convolve_scipy_signal),
    LibraryConvolution(name="scipy.ndimage.convolve, 1 core", convolve=convolve_scipy_ndimage),
)


def measure_library(
    baseline: LibraryConvolution, problem: ConvProblem, clock: Clock
) -> OperationPart:
    """Time a baseline on the whole batch, or on as many images as the time budget allows."""
    filters = problem.ones_filter()
    images = problem.make_images(range(min(TRIAL_IMAGES, problem.images)))
    baseline.convolve(images, filters)
    trial = _time_call(baseline, images, filters, clock)
    count = images_within_limit(trial / len(images), problem.images)
    images = problem.make_images(range(count))
    return OperationPart(
        name=baseline.name,
        seconds=tuple(_time_call(baseline, images, filters, clock) for _ in range(REPEATS)),
        images=count,
        bytes=2 * images.nbytes,
        baseline=True,
        note="" if count == problem.images else f"on {count} of {problem.images} images",
    )


def images_within_limit(seconds_per_image: float, images: int) -> int:
    """How many of the images fit into one call's time budget: at least one."""
    if seconds_per_image * images <= CALL_LIMIT_S:
        return images
    return max(1, int(CALL_LIMIT_S / seconds_per_image))


def _time_call(
    baseline: LibraryConvolution, images: AnyFloat, filters: AnyFloat, clock: Clock
) -> float:
    start = clock()
    baseline.convolve(images, filters)
    return clock() - start


D = TypeVar("D")


@dataclass(frozen=True, kw_only=True)
class ConvTask(Generic[D]):
    """One rank's part. ``plan`` is complete, ``parameters`` are all of the workload's.

    ``devices`` are those that this process drives, the same number on every rank. ``barrier``
    waits for all ranks; ``beat`` takes (calls done, calls planned). Under an experiment, which
    has something ``left_out``, nothing but the measurement's throughput is timed.
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
        """The whole problem, of all ranks."""
        return ConvProblem.of(self.parameters, self.plan)

    @property
    def device_images(self) -> list[range]:
        """The images of each of this rank's devices."""
        return self.problem.images_of_rank(self.rank, self.world_size, len(self.devices))

    @property
    def cores(self) -> int:
        """The cores this process may use, at most the plan's: a mask does not show a quota."""
        planned = (self.plan.cores_per_device or 1) * (self.plan.devices or 1)
        return min(len(os.sched_getaffinity(0)), planned)


@dataclass(frozen=True, kw_only=True)
class ConvResult:
    """What one rank measured, under the names of ``RankSamples``.

    ``peak_memory_bytes`` is that of the way end to end, before the cache probes took buffers
    of their own: what the library's allocator held on the fullest device, or on the CPU what
    the process held.
    """

    parts: tuple[OperationPart, ...]
    windows: tuple[Window, ...]
    first_step_ms: float
    peak_memory_bytes: int


def first_call(
    begin: Callable[[], ConvProcess[H]], host: H, note: str, clock: Clock
) -> tuple[ConvProcess[H], OperationPart]:
    """Begin a process; the part is the seconds until its first results are on the host."""
    start = clock()
    process = begin()
    process.end_to_end(host)
    seconds = clock() - start
    images, moved = process.problem.images, 2 * process.one_way_bytes
    part = OperationPart(
        name="first call", seconds=(seconds,), images=images, bytes=moved, note=note
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
    """Verify, time every part, verify what the timed calls left, then time the baselines."""
    expected = process.verify(hosts)
    peak = process.peak_memory_bytes()
    if task.variant:
        probes = [process.throughput_call(hosts, resident=task.variant.input == "resident")]
    else:
        probes = process.timed_calls(hosts)
    sampler = _call_timer(task, clock)
    parts, windows = sampler.run(probes)
    for host in hosts.values():
        process.compare(host, expected)
    others = []
    for baseline in () if process.problem.copy_only or task.variant else libraries:
        others += _measure_on_rank_0(task, baseline, clock)
        sampler.beat_finished(len(probes))
    return ConvResult(
        parts=(first_part, *parts, *others),
        windows=windows,
        first_step_ms=1e3 * first_part.seconds[0],
        peak_memory_bytes=peak,
    )


def _call_timer(task: ConvTask[D], clock: Clock) -> CallTimer:
    assert task.plan.steps is not None
    return CallTimer(
        images=task.problem.images,
        rank_images=sum(map(len, task.device_images)),
        warmup=task.plan.warmup_steps or 0,
        steps=task.plan.steps,
        clock=clock,
        barrier=task.barrier,
        beat=task.beat,
    )


def _measure_on_rank_0(
    task: ConvTask[D], baseline: LibraryConvolution, clock: Clock
) -> list[OperationPart]:
    parts = [measure_library(baseline, task.problem, clock)] if task.rank == 0 else []
    task.barrier()
    return parts
