"""A process with lanes of two GPUs' kind, played by a fake that keeps a log."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from nfold.core.errors import Mismatch
from nfold.core.plan import Plan
from nfold.workloads.conv2d.device import (
    ConvDevice,
    DeviceAction,
    HostBuffers,
    KernelTimer,
    ReadSeconds,
)
from nfold.workloads.conv2d.problem import AnyFloat, Array, ConvProblem, ConvTask, scipy_reference
from nfold.workloads.conv2d.process import (
    SCIPY_LIBRARIES,
    Convolve,
    ConvProcess,
    first_call,
    images_within_limit,
    measure_library,
)
from nfold.workloads.conv2d.torch import torch_on_cpu

BASELINES = {**SCIPY_LIBRARIES, **torch_on_cpu(1)}
PROBLEM = ConvProblem(images=5, channels=1, size=6, filter=3, copy_only=False, seed=0)


class FakeHost(HostBuffers):
    def to_float32(self, values: Array, places: Sequence[int]) -> Array:
        return values[list(places)]

    def fill_nan(self) -> None:
        self.results[:] = np.nan


class FakeDevice(ConvDevice[FakeHost]):
    """Computes with scipy and writes every call into a log."""

    def __init__(self, place: slice, log: list[str]) -> None:
        self.place, self.log = place, log

    def finish(self) -> None:
        self.log.append("finish")

    def create_input(self, images: Array) -> Array:
        return images

    def create_filters(self, filters: Array) -> Array:
        return filters[..., ::-1, ::-1]

    def upload(self, host: FakeHost) -> None:
        self.log.append("upload")
        self.input = host.images[self.place]

    def compute(self) -> None:
        self.log.append("compute")
        self.result = scipy_reference(self.input, self.filters).astype(np.float32)

    def pass_through(self) -> None:
        self.log.append("skip")
        super().pass_through()

    def download(self, host: FakeHost) -> None:
        self.log.append("download")
        host.results[self.place] = self.result


class FakeTimer(KernelTimer[FakeDevice]):
    """Every action takes ``seconds``."""

    def __init__(self, device: FakeDevice, seconds: float) -> None:
        super().__init__(device)
        self.seconds = seconds

    def combine_seconds(self, seconds: Sequence[float]) -> float:
        return max(seconds)

    def time_action(self, action: Callable[[], object]) -> ReadSeconds:
        self.device.log.append("timed")
        action()
        return lambda: self.seconds

    def copy_input(self) -> Array:
        copied: Array = self.device.input
        return copied

    def rotate_images(self) -> None:
        self.device.log.append("turn")

    def evict(self) -> None:
        self.device.log.append("evict")

    def iterate(self) -> None:
        self.device.log.append("iterate")


def made(
    problem: ConvProblem = PROBLEM,
) -> tuple[ConvProcess[FakeHost], dict[str, FakeHost], list[str]]:
    """Two lanes of rank 0 of 1 and two hosts, with the ones filter in use."""
    log: list[str] = []
    lanes = [FakeDevice(slice(0, 2), log), FakeDevice(slice(2, 5), log)]
    images = problem.make_images(range(5))
    hosts = {
        kind: FakeHost(images=images, results=np.zeros_like(images))
        for kind in ("pageable", "pinned")
    }
    process = ConvProcess(
        problem=problem,
        devices=lanes,
        kernel_timers=[FakeTimer(lanes[0], 1.0), FakeTimer(lanes[1], 3.0)],
        device_images=problem.images_of_rank(0, 1, 2),
        precision="fp32",
        itemsize=4,
        clock=lambda: 0.0,
    )
    process.verify(hosts)
    log.clear()
    return process, hosts, log


def test_devices_alternate_actions_and_finish_last() -> None:
    process, hosts, log = made()
    process.round_trip(hosts["pinned"])
    each = ["upload", "compute", "download", "finish"]
    assert log == [action for action in each for _ in range(2)]


def _these(
    steps: Sequence[DeviceAction], host: FakeHost, copy_only: bool
) -> Sequence[DeviceAction]:
    return steps


def test_devices_with_different_action_counts_alternate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, hosts, log = made()
    for lane, names in zip(process.devices, ("ab", "cde"), strict=True):
        steps = [partial(log.append, name) for name in names]
        monkeypatch.setattr(lane, "round_trip", partial(_these, steps))
    process.round_trip(hosts["pinned"])
    assert log == ["a", "c", "b", "d", "e", "finish", "finish"]


def test_notes_name_method_and_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    process, hosts, _ = made()
    monkeypatch.setattr(FakeDevice, "method", "cuDNN")
    monkeypatch.setattr(FakeDevice, "overlap", lambda lane, host: "in 8 chunks")
    notes = {probe.name: probe.note for probe in process.timed_calls(hosts)}
    assert notes["end to end, pinned"] == notes["copy only, pinned"] == "in 8 chunks"
    assert notes["resident loop"].endswith(", by cuDNN")
    assert notes["copy to device, pinned"] == ""


def test_copies_and_kernels_are_apart_and_only_pinned_end_to_end_is_windowed() -> None:
    process, hosts, _ = made()
    probes = process.timed_calls(hosts)
    assert [probe.name for probe in probes] == [
        "copy to device, pageable",
        "copy to device, pinned",
        "copy from device, pageable",
        "copy from device, pinned",
        "copy only, pageable",
        "copy only, pinned",
        "end to end, pageable",
        "end to end, pinned",
        "convolution, cold cache",
        "convolution, warm cache",
        "resident loop",
    ]
    assert [probe.name for probe in probes if probe.is_throughput] == ["end to end, pinned"]
    one_way = 5 * 6 * 6 * 4
    assert [probe.bytes for probe in probes] == [one_way] * 4 + [2 * one_way] * 7


def test_kernel_seconds_combine_devices() -> None:
    process, hosts, log = made()
    seconds = {probe.name: probe.call() for probe in process.timed_calls(hosts)}
    assert seconds["convolution, cold cache"] == 3.0
    assert seconds["resident loop"] == 3.0 / KernelTimer.chain_length
    assert log.count("iterate") == 2


def test_cold_evicts_between_calls_and_warm_repeats_the_call() -> None:
    process, _, log = made()
    timer = process.kernel_timers[0]
    timer.cold()
    assert log == ["turn", "evict", "timed", "compute"]
    log.clear()
    timer.warm()
    assert log == ["evict", "compute", "timed", "compute"]


def test_copy_only_has_no_kernel_and_its_last_way_is_windowed() -> None:
    problem = ConvProblem(images=5, channels=1, size=6, filter=3, copy_only=True, seed=0)
    process, hosts, log = made(problem)
    probes = process.timed_calls(hosts)
    assert [probe.name for probe in probes if probe.is_throughput] == ["copy only, pinned"]
    for probe in probes:
        probe.call()
    assert "compute" not in log


@pytest.mark.parametrize("image", range(5))
def test_a_wrong_image_is_named_by_its_index_where_it_is_looked_at(image: int) -> None:
    """First, middle and last of each lane are looked at: here that is every image."""
    process, hosts, _ = made()
    expected = process.verify(hosts)
    hosts["pinned"].results[image] += 1
    process.compare(hosts["pageable"], expected)
    with pytest.raises(Mismatch, match=f"image {image} "):
        process.compare(hosts["pinned"], expected)


@pytest.mark.parametrize(
    ("resident", "told"),
    [(False, ["upload", "compute", "download", "finish"]), (True, ["compute", "finish"])],
)
def test_an_experiment_times_one_way_and_without_copies_what_is_on_the_devices(
    resident: bool, told: list[str]
) -> None:
    process, hosts, log = made()
    probe = process.throughput_call(hosts, resident=resident)
    assert probe.is_throughput
    probe.call()
    assert log == [action for action in told for _ in range(2)]


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES)
@pytest.mark.parametrize("width", [3, 5, 10])
@pytest.mark.parametrize("channels", [1, 3])
def test_baselines_agree_with_the_reference(baseline: Convolve, width: int, channels: int) -> None:
    problem = ConvProblem(
        images=2, channels=channels, size=12, filter=width, copy_only=False, seed=0
    )
    images, filters = problem.make_images(range(2)), problem.random_filter()
    found, expected = baseline(images, filters), scipy_reference(images, filters)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_torch_on_cpu_names_and_restores_threads() -> None:
    import torch

    before = torch.get_num_threads()
    ((name, baseline),) = torch_on_cpu(before + 1).items()
    baseline(np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 3, 3), np.float32))
    assert f"{before + 1} threads" in name
    assert torch.get_num_threads() == before


def test_a_part_of_a_baseline_is_marked_and_counts_what_it_did() -> None:
    problem = ConvProblem(images=6, channels=1, size=8, filter=3, copy_only=False, seed=0)
    ticks = itertools.count()
    part = measure_library(
        *next(iter(SCIPY_LIBRARIES.items())), problem, lambda: next(ticks) / 1000
    )
    assert part.baseline
    assert (part.images, part.bytes, part.note) == (6, 2 * 6 * 64 * 4, "")
    assert part.seconds == pytest.approx([0.001] * 3)


def test_slow_library_gets_fewer_images_with_a_note() -> None:
    problem = ConvProblem(images=100, channels=1, size=4, filter=3, copy_only=False, seed=0)
    now = [0.0]
    seen: list[int] = []

    def slow(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
        seen.append(len(images))
        now[0] += 0.1 * len(images)
        return images

    part = measure_library("slow", slow, problem, lambda: now[0])
    assert part.images == seen[-1] == images_within_limit(0.1, 100)
    assert 1 <= part.images < 100
    assert part.note == f"on {part.images} of 100 images"
    assert images_within_limit(60.0, 100) == 1


def task(rank: int = 1, cores_per_device: int = 1) -> ConvTask:
    return ConvTask(
        parameters={"size": 4, "channels": 1, "filter": 3, "copy_only": 0},
        plan=Plan(batch=7, devices=3, cores_per_device=cores_per_device),
        rank=rank,
        world_size=3,
        devices=["one"],
        barrier=lambda: None,
        beat=lambda done, total: None,
    )


def test_a_rank_knows_its_images() -> None:
    assert [task(rank).device_images for rank in range(3)] == [
        [range(2)],
        [range(2, 4)],
        [range(4, 7)],
    ]


def test_the_cores_are_the_plans_but_never_more_than_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert task(cores_per_device=1).cores == 3
    assert task(cores_per_device=2).cores == 4


def test_the_first_call_has_the_beginning_in_it() -> None:
    now = [0.0]

    def spend(seconds: float) -> float:
        now[0] += seconds
        return seconds

    def begin() -> SimpleNamespace:
        spend(2.0)
        problem = SimpleNamespace(images=7)
        return SimpleNamespace(
            problem=problem, one_way_bytes=10, round_trip=lambda host: spend(host)
        )

    _, part = first_call(begin, 0.5, "why", lambda: now[0])  # type: ignore[arg-type, type-var]
    assert (part.name, part.seconds, part.images, part.bytes) == ("first call", (2.5,), 7, 20)
