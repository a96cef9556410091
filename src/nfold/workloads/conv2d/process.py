"""The timed parts of one process, the verification of results, and other libraries on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import zip_longest
from typing import Any, Generic

import numpy as np
from scipy import ndimage

from nfold.core.measurement import OperationPart, Window
from nfold.workloads.conv2d.device import ConvDevice, DeviceAction, H, KernelTimer, ReadSeconds
from nfold.workloads.conv2d.problem import (
    AnyFloat,
    ConvProblem,
    ConvTask,
    check_result,
    convolve_image,
    scipy_reference,
    spot_check_indices,
)

Clock = Callable[[], float]

MAX_WINDOWS = 10
WARMUP_LIMIT_S = 2.0
PART_LIMIT_S = 5.0  # after MIN_CALLS calls; not for the throughput
MIN_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class TimedCall:
    """A timed call; ``call`` returns its seconds.

    ``bytes`` is the minimum that one call moves on all ranks. With ``is_throughput`` all calls are
    made, in windows that begin at the same time on every rank.
    """

    name: str
    call: Callable[[], float]
    bytes: int
    note: str = ""
    is_throughput: bool = False


@dataclass(frozen=True, kw_only=True)
class CallTimer:
    """Times calls one after the other: warm-up, then ``steps`` repetitions of each.

    ``images`` are the images per call on all ranks, ``rank_images`` on this rank. ``clock`` is the
    host's monotonic clock in seconds; ``barrier`` waits for all ranks; ``beat`` takes (calls done,
    calls planned).
    """

    images: int
    rank_images: int
    warmup: int
    steps: int
    clock: Clock
    barrier: Callable[[], None]
    beat: Callable[[int, int], None]

    def run(
        self, timed_calls: Sequence[TimedCall]
    ) -> tuple[tuple[OperationPart, ...], tuple[Window, ...]]:
        """Return one part per timed call, and the windows of the throughput."""
        parts: list[OperationPart] = []
        windows: list[Window] = []
        total = self.steps * len(timed_calls)
        for index, timed_call in enumerate(timed_calls):
            calls = self._calls(timed_call, index * self.steps, total)
            self._warm_up(calls)
            self.barrier()
            throughput = timed_call.is_throughput
            seconds = self._windows(calls, windows) if throughput else self._timed_part(calls)
            parts.append(
                OperationPart(
                    name=timed_call.name,
                    seconds=tuple(seconds),
                    images=self.images,
                    bytes=timed_call.bytes,
                    note=timed_call.note,
                )
            )
        return tuple(parts), tuple(windows)

    def _calls(self, timed_call: TimedCall, before: int, total: int) -> Iterator[float]:
        done = 0
        while True:
            seconds = timed_call.call()
            done += 1
            self.beat(before + min(done, self.steps), total)
            yield seconds

    def _warm_up(self, calls: Iterator[float]) -> None:
        start = self.clock()
        for _ in range(self.warmup):
            next(calls)
            if self.clock() - start > WARMUP_LIMIT_S:
                return

    def _timed_part(self, calls: Iterator[float]) -> list[float]:
        start = self.clock()
        seconds: list[float] = []
        while len(seconds) < self.steps:
            seconds.append(next(calls))
            if len(seconds) >= MIN_CALLS and self.clock() - start > PART_LIMIT_S:
                break
        return seconds

    def _windows(self, calls: Iterator[float], windows: list[Window]) -> list[float]:
        seconds: list[float] = []
        for steps in window_sizes(self.steps):
            self.barrier()
            start = self.clock()
            seconds.extend(next(calls) for _ in range(steps))
            duration, samples = self.clock() - start, steps * self.rank_images
            windows.append(Window(start_s=start, seconds=duration, steps=steps, samples=samples))
        return seconds


def window_sizes(steps: int) -> list[int]:
    count = min(MAX_WINDOWS, steps)
    return [(k + 1) * steps // count - k * steps // count for k in range(count)]


NO_COPY_NOTE = "the device computes in host memory: nothing is copied"
HOST_COPY_NOTE = "a copy within host memory: the device needs no copy"


@dataclass(frozen=True, kw_only=True)
class ConvProcess(Generic[H]):
    """The devices of one process, with a timer and consecutive ``device_images`` of each.

    ``hosts`` are the host buffers by kind: ``pageable`` and ``pinned``, or one with an empty name.
    The throughput is end to end with the last kind. ``itemsize`` is in bytes.
    """

    problem: ConvProblem
    devices: Sequence[ConvDevice[H]]
    kernel_timers: Sequence[KernelTimer[Any]]
    device_images: Sequence[range]
    precision: str
    itemsize: int
    clock: Clock

    @property
    def one_way_bytes(self) -> int:
        """Bytes of the images of all ranks, or of their results."""
        return self.problem.value_count(self.problem.images) * self.itemsize

    def round_trip(self, host: H, copy_only: bool | None = None) -> float:
        """Return the seconds from images on the host to results on the host.

        Without convolution if ``copy_only``, by default if the problem says so.
        """
        without = self.problem.copy_only if copy_only is None else copy_only
        return self._host_time(lambda device: device.round_trip(host, without))

    def _host_time(self, actions: Callable[[ConvDevice[H]], Sequence[DeviceAction]]) -> float:
        start = self.clock()
        for simultaneous in zip_longest(*map(actions, self.devices)):
            for device, action in zip(self.devices, simultaneous, strict=True):
                if action is not None:
                    with device.work():
                        action()
        self._finish()
        return self.clock() - start

    def _device_time(self, action: Callable[[KernelTimer[Any]], ReadSeconds]) -> float:
        readings = []
        for timer in self.kernel_timers:
            with timer.device.work():
                readings.append(action(timer))
        self._finish()
        return self.kernel_timers[0].combine_seconds([read() for read in readings])

    def _finish(self) -> None:
        for device in self.devices:
            device.finish()

    def timed_calls(self, hosts: Mapping[str, H]) -> list[TimedCall]:
        """Return all timed calls, in order; they leave the results of the convolution."""
        throughput_kind = list(hosts)[-1]
        calls = [] if hosts[throughput_kind].in_place else self._copy_calls(hosts)
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

        def actions(device: ConvDevice[H]) -> list[DeviceAction]:
            return [device.pass_through if copy_only else device.compute]

        call = partial(self._host_time, actions)
        return TimedCall(
            name="resident", call=call, bytes=2 * self.one_way_bytes, is_throughput=True
        )

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
        if host.in_place:
            note = HOST_COPY_NOTE if copy_only else NO_COPY_NOTE
        return TimedCall(
            name=_with_kind("copy only" if copy_only else "end to end", kind),
            call=partial(self.round_trip, host, copy_only),
            bytes=2 * self.one_way_bytes,
            note=note,
            is_throughput=is_throughput,
        )

    def _kernel_calls(self) -> list[TimedCall]:
        device, timer = self.devices[0], self.kernel_timers[0]
        moved_bytes = 2 * self.problem.value_count(len(self.device_images[0])) * self.itemsize
        by = f", by {device.method}" if device.method else ""
        size = f"{moved_bytes / 1e6:.1f} MB per device{by}"

        cold = f"{size}, after writing {timer.eviction_bytes / 1e6:.0f} MB"
        chain = f"mean of a chain of {timer.chain_length}, each with the previous results{by}"
        kernels: dict[str, tuple[Callable[[KernelTimer[Any]], ReadSeconds], str]] = {
            "convolution, cold cache": (lambda timer: timer.cold(), cold),
            "convolution, warm cache": (lambda timer: timer.warm(), size),
            "resident loop": (lambda timer: timer.resident(), chain),
        }
        return [
            TimedCall(
                name=name,
                call=partial(self._device_time, action),
                bytes=2 * self.one_way_bytes,
                note=note,
            )
            for name, (action, note) in kernels.items()
        ]

    def verify(self, hosts: Mapping[str, H]) -> AnyFloat:
        """Compare the results for every kind of host buffers with scipy; raises Mismatch.

        Uses random filters, which detect a flip or a shift, and then ones. Returns the reference
        for ones, which the devices and results are left with.
        """
        host = next(iter(hosts.values()))
        inputs = host.to_float32(host.images, self._checked_indices())
        for filters in (self.problem.random_filter(), self.problem.ones_filter()):
            for device in self.devices:
                with device.work():
                    device.set_filters(filters)
            expected = inputs if self.problem.copy_only else scipy_reference(inputs, filters)
            for host in hosts.values():
                host.fill_nan()
                self.round_trip(host)
                self.compare(host, expected)
        return expected

    def compare(self, host: H, expected: AnyFloat) -> None:
        indices, first = self._checked_indices(), self.device_images[0].start
        images = [first + index for index in indices]
        check_result(host.to_float32(host.results, indices), expected, images, self.precision)

    def _checked_indices(self) -> list[int]:
        first = self.device_images[0].start
        return [
            images[index] - first
            for images in self.device_images
            for index in spot_check_indices(len(images))
        ]


def _with_kind(name: str, kind: str) -> str:
    return f"{name}, {kind}" if kind else name


REPEATS = 3
CALL_LIMIT_S = 2.0  # a slower library gets fewer images
TRIAL_IMAGES = 4

# of images [n, c, h, w] with filters [c, c, k, k] on the CPU
Convolve = Callable[[AnyFloat, AnyFloat], AnyFloat]


def convolve_scipy_signal(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
    return np.stack([convolve_image(image, filters) for image in images])


def convolve_scipy_ndimage(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
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


SCIPY_LIBRARIES: Mapping[str, Convolve] = {
    "scipy.signal.convolve2d, 1 core": convolve_scipy_signal,
    "scipy.ndimage.convolve, 1 core": convolve_scipy_ndimage,
}


def measure_library(
    name: str, convolve: Convolve, problem: ConvProblem, clock: Clock
) -> OperationPart:
    """Time a library on the whole batch, or on as many images as CALL_LIMIT_S allows."""
    filters = problem.ones_filter()

    def time_call(images: AnyFloat) -> float:
        start = clock()
        convolve(images, filters)
        return clock() - start

    images = problem.make_images(range(min(TRIAL_IMAGES, problem.images)))
    convolve(images, filters)
    count = images_within_limit(time_call(images) / len(images), problem.images)
    images = problem.make_images(range(count))
    return OperationPart(
        name=name,
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
    process.round_trip(host)
    part = OperationPart(
        name="first call",
        seconds=(clock() - start,),
        images=process.problem.images,
        bytes=2 * process.one_way_bytes,
        note=note,
    )
    return process, part


def run_rank(
    task: ConvTask,
    create_device: Callable[[ConvTask, int, H], ConvDevice[H]],
    create_timer: Callable[[Any], KernelTimer[Any]],
    hosts: Mapping[str, H],
    *,
    libraries: Mapping[str, Convolve],
    first_call_note: str,
    peak_memory_bytes: Callable[[], int],
    clock: Clock,
    more_hosts: Callable[[], Mapping[str, H]] = dict,
) -> ConvResult:
    """Time every part on one rank, with a verification before and after, then ``libraries``.

    ``more_hosts`` are created after the first call. Raises Mismatch for a result that differs from
    scipy's.
    """
    host = next(iter(hosts.values()))

    def create_process() -> ConvProcess[H]:
        devices = [create_device(task, index, host) for index in range(len(task.devices))]
        return ConvProcess(
            problem=task.problem,
            devices=devices,
            kernel_timers=[create_timer(device) for device in devices],
            device_images=task.device_images,
            precision=str(task.plan.precision),
            itemsize=host.images.itemsize,
            clock=clock,
        )

    process, first_part = first_call(create_process, host, first_call_note, clock)
    hosts = {**hosts, **more_hosts()}
    expected = process.verify(hosts)
    peak = peak_memory_bytes()
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
    for buffers in hosts.values():
        process.compare(buffers, expected)
    library_parts = []
    if process.problem.copy_only or task.variant:
        libraries = {}
    for name, convolve in libraries.items():
        if task.rank == 0:
            library_parts.append(measure_library(name, convolve, task.problem, clock))
        task.barrier()
        total = task.plan.steps * len(calls)
        task.beat(total, total)
    return ConvResult(
        parts=(first_part, *parts, *library_parts),
        windows=windows,
        first_step_ms=1e3 * first_part.seconds[0],
        peak_memory_bytes=peak,
    )
