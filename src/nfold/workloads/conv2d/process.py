"""What one process times on its lanes, and how it makes sure that the results are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Generic

from nfold.workloads.conv2d.check import AnyFloat, check_result, scipy_reference, spot_check_indices
from nfold.workloads.conv2d.lane import ConvDevice, DeviceAction, H, ReadSeconds
from nfold.workloads.conv2d.problem import Array, ConvProblem
from nfold.workloads.conv2d.sampling import Clock, TimedCall

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
        """Each step is queued on every lane before the next one, so that lanes overlap."""
        start = self.clock()
        for turn in zip_longest(*map(steps, self.devices)):
            for lane, step in zip(self.devices, turn, strict=True):
                if step is not None:
                    with lane.work():
                        step()
        self._finish()
        return self.clock() - start

    def _device_time(self, action: Callable[[ConvDevice[H]], ReadSeconds]) -> float:
        """Seconds by the devices' own clocks."""
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
