"""What one process times on its lanes, and how it makes sure that the results are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Generic

from nfold.workloads.conv2d.check import AnyFloat, check, reference, sample_of
from nfold.workloads.conv2d.lane import H, Lane, Reading, Step
from nfold.workloads.conv2d.problem import Array, Problem
from nfold.workloads.conv2d.sampling import Clock, Probe

ON_HOST = "the device computes where the images lie: nothing is copied to it or from it"
COPY_ON_HOST = "a plain copy in host memory: the device needs none"


@dataclass(frozen=True, kw_only=True)
class Process(Generic[H]):
    """The lanes of one process; ``shares`` are the images of each, consecutive.

    Hosts come by kind: ``pageable`` and ``pinned``, or one without a kind that the lanes read in
    place. The last one's way end to end is the measurement's throughput. ``itemsize`` is the
    bytes of a value.
    """

    problem: Problem
    lanes: Sequence[Lane[H]]
    shares: Sequence[range]
    precision: str
    itemsize: int
    clock: Clock

    @property
    def one_way_bytes(self) -> int:
        """The images of all ranks; the results are as many."""
        return self.problem.pixels(self.problem.images) * self.itemsize

    def end_to_end(self, host: H) -> float:
        """Seconds from images on the host to results on the host."""
        return self._there_and_back(host, self.problem.copy_only)

    def copy_only(self, host: H) -> float:
        """Seconds there and back, nothing convolved."""
        return self._there_and_back(host, True)

    def _there_and_back(self, host: H, copy_only: bool) -> float:
        return self._host_time(lambda lane: lane.there_and_back(host, copy_only))

    def _host_time(self, steps: Callable[[Lane[H]], Sequence[Step]]) -> float:
        """Each step is queued on every lane before the next one, so that lanes overlap."""
        start = self.clock()
        for turn in zip_longest(*map(steps, self.lanes)):
            for lane, step in zip(self.lanes, turn, strict=True):
                if step is not None:
                    with lane.work():
                        step()
        self._finish()
        return self.clock() - start

    def _device_time(self, action: Callable[[Lane[H]], Reading]) -> float:
        """Seconds by the devices' own clocks."""
        readings = []
        for lane in self.lanes:
            with lane.work():
                readings.append(action(lane))
        self._finish()
        return self.lanes[0].together([read() for read in readings])

    def _finish(self) -> None:
        for lane in self.lanes:
            lane.finish()

    def probes(self, hosts: Mapping[str, H]) -> list[Probe]:
        """Everything to time, in order; the results that it leaves are the convolution's."""
        last = list(hosts)[-1]
        found = self._one_way(hosts) if self._copies(last) else []
        found += [self._copy_only(kind, hosts, kind == last) for kind in hosts]
        if self.problem.copy_only:
            return found
        found += [self._end_to_end(kind, hosts, kind == last) for kind in hosts]
        return found + self._kernels()

    def throughput(self, hosts: Mapping[str, H], *, resident: bool) -> Probe:
        """The one probe of an experiment: end to end, or from images to results on the devices."""
        kind = list(hosts)[-1]
        if not resident:
            whole = self._copy_only if self.problem.copy_only else self._end_to_end
            return whole(kind, hosts, True)
        call = partial(self._host_time, lambda lane: [lane.between(self.problem.copy_only)])
        return Probe(name="resident", call=call, bytes=2 * self.one_way_bytes, windowed=True)

    def _copies(self, kind: str) -> bool:
        return bool(kind) or self.lanes[0].copies

    def _one_way(self, hosts: Mapping[str, H]) -> list[Probe]:
        there = [self._upload(kind, host) for kind, host in hosts.items()]
        return there + [self._download(kind, host) for kind, host in hosts.items()]

    def _upload(self, kind: str, host: H) -> Probe:
        call = partial(self._host_time, lambda lane: [partial(lane.upload, host)])
        return Probe(name=_named("copy to device", kind), call=call, bytes=self.one_way_bytes)

    def _download(self, kind: str, host: H) -> Probe:
        call = partial(self._host_time, lambda lane: [partial(lane.download, host)])
        return Probe(name=_named("copy from device", kind), call=call, bytes=self.one_way_bytes)

    def _copy_only(self, kind: str, hosts: Mapping[str, H], last: bool) -> Probe:
        return Probe(
            name=_named("copy only", kind),
            call=partial(self.copy_only, hosts[kind]),
            bytes=2 * self.one_way_bytes,
            note=self.lanes[0].overlap(hosts[kind]) if self._copies(kind) else COPY_ON_HOST,
            windowed=last and self.problem.copy_only,
        )

    def _end_to_end(self, kind: str, hosts: Mapping[str, H], last: bool) -> Probe:
        return Probe(
            name=_named("end to end", kind),
            call=partial(self.end_to_end, hosts[kind]),
            bytes=2 * self.one_way_bytes,
            note=self.lanes[0].overlap(hosts[kind]) if self._copies(kind) else ON_HOST,
            windowed=last,
        )

    def _kernels(self) -> list[Probe]:
        lane = self.lanes[0]
        moved = 2 * self.problem.pixels(len(self.shares[0])) * self.itemsize
        by = f", by {lane.method}" if lane.method else ""
        size = f"{moved / 1e6:.1f} MB a device{by}"
        cold = f"{size}, after writing {lane.eviction_bytes / 1e6:.0f} MB"
        chain = f"mean of {lane.chain} in a row, each of the results of the one before{by}"
        return [
            self._kernel("convolution, cold cache", lambda lane: lane.cold(), cold),
            self._kernel("convolution, warm cache", lambda lane: lane.warm(), size),
            self._kernel("resident loop", lambda lane: lane.resident(), chain),
        ]

    def _kernel(self, name: str, action: Callable[[Lane[H]], Reading], note: str) -> Probe:
        call = partial(self._device_time, action)
        return Probe(name=name, call=call, bytes=2 * self.one_way_bytes, note=note)

    def verify(self, hosts: Mapping[str, H]) -> AnyFloat:
        """Compare every way through the devices with scipy, with random filters and with ones.

        Raises Mismatch. Random filters find a flip or a shift that ones would hide. Afterwards
        the filters are ones, every host's results are theirs, and so is the returned reference.
        """
        for filters in (self.problem.asymmetric(), self.problem.ones()):
            self._use(filters)
            expected = self._expected(next(iter(hosts.values())), filters)
            for host in hosts.values():
                host.wipe()
                self.end_to_end(host)
                self.compare(host, expected)
        return expected

    def compare(self, host: H, expected: AnyFloat) -> None:
        """Compare a handful of the host's results, from every lane; raises Mismatch."""
        check(host.outputs(self._places()), expected, self._handful(), self.precision)

    def _expected(self, host: H, filters: Array) -> AnyFloat:
        inputs = host.inputs(self._places())
        return inputs if self.problem.copy_only else reference(inputs, filters)

    def _handful(self) -> list[int]:
        return [share[place] for share in self.shares for place in sample_of(len(share))]

    def _places(self) -> list[int]:
        return [image - self.shares[0].start for image in self._handful()]

    def _use(self, filters: Array) -> None:
        for lane in self.lanes:
            with lane.work():
                lane.use(filters)

    def peak_memory_bytes(self) -> int:
        """The most that the fullest lane held so far."""
        return max(lane.peak_memory_bytes() for lane in self.lanes)


def _named(name: str, kind: str) -> str:
    return f"{name}, {kind}" if kind else name
