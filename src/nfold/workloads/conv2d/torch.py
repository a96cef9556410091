"""The convolution on PyTorch devices: one process drives one device, or (``dp``) all devices.

Images and results on the host have the plan's precision. The first call includes the search for the
fastest kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from nfold.core import machine
from nfold.core.plan import Plan
from nfold.workloads.conv2d.device import (
    ConvDevice,
    DeviceAction,
    HostBuffers,
    KernelTimer,
    ReadSeconds,
)
from nfold.workloads.conv2d.problem import AnyFloat, Array, to_correlation
from nfold.workloads.conv2d.problem import ConvTask as Task
from nfold.workloads.conv2d.process import SCIPY_LIBRARIES, Clock, Convolve, ConvResult, run_rank

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
MEMORY_FORMATS = {"channels_first": torch.contiguous_format, "channels_last": torch.channels_last}


def to_tensor(values: AnyFloat, plan: Plan, device: torch.device | None = None) -> Tensor:
    """Return a tensor with the dtype and memory format of a complete plan."""
    tensor = torch.from_numpy(values).to(device=device, dtype=DTYPES[str(plan.precision)])
    return tensor.contiguous(memory_format=MEMORY_FORMATS[str(plan.layout)])


@dataclass(frozen=True, kw_only=True)
class TorchHostBuffers(HostBuffers):
    page_locked: bool = False

    def pinned(self) -> TorchHostBuffers:
        images, results = self.images.pin_memory(), self.results.pin_memory()
        return TorchHostBuffers(images=images, results=results, page_locked=True)

    def to_float32(self, values: Tensor, indices: Sequence[int]) -> Array:
        return to_float32(values[list(indices)])

    def fill_nan(self) -> None:
        self.results.fill_(torch.nan)


def to_float32(values: Tensor) -> Array:
    array: Array = values.float().contiguous().numpy()
    return array


def convolve(images: Tensor, filters: Tensor) -> Tensor:
    """Correlate with the padding of scipy's ``same``, summed over input channels.

    For an even filter scipy pads one pixel more before than after; torch's ``same`` after.
    """
    before, after = filters.shape[-1] // 2, (filters.shape[-1] - 1) // 2
    if before == after:
        return functional.conv2d(images, filters, padding=before)
    return functional.conv2d(functional.pad(images, (before, after) * 2), filters)


class TorchCpuDevice(ConvDevice[TorchHostBuffers]):
    """A CPU device that convolves the host's images in place."""

    input: Tensor

    def create_input(self, images: Tensor) -> Tensor:
        return images

    def create_filters(self, filters: Array) -> Tensor:
        return to_tensor(filters, self.plan, self.device)

    def compute(self) -> None:
        self.result = convolve(self.input, self.filters)

    def download(self, host: TorchHostBuffers) -> None:
        host.results[self.image_slice].copy_(self.result, non_blocking=True)


class TorchCpuKernelTimer(KernelTimer[TorchCpuDevice]):
    def copy_input(self) -> Tensor:
        copied: Tensor = self.device.input.clone()
        return copied

    @cached_property
    def _eviction(self) -> Tensor:
        return torch.empty(self.eviction_bytes, dtype=torch.uint8, device=self.device.device)

    def evict(self) -> None:
        self._eviction.zero_()

    def iterate(self) -> None:
        images = self.device.input
        for _ in range(self.chain_length):
            images = convolve(images, self.mean_filters)


# The convolution on a GPU, by the faster of cuDNN and the Triton kernel, overlapped with copies.
#
# The first convolution of a problem times cuDNN and all configurations of ``triton_kernel.py``,
# including compilation. A launch from Python takes about as long as the kernel, so consecutive
# launches are captured as a CUDA graph.

# (images [n, c, h, w], filters [c out, c, k, k], out) to results, in ``out`` if the method uses it
ConvMethod = Callable[..., Tensor]
NamedMethod = tuple[str, ConvMethod]
M = TypeVar("M")
R = TypeVar("R")
SEARCH_CALLS = 10
SEARCH_REPLAYS = 3


class TorchCudaDevice(TorchCpuDevice):
    def __init__(self, task: Task, index: int, host: TorchHostBuffers) -> None:
        device = task.devices[index]
        self.stream, self._upload_stream, self._download_stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self._in_flight: list[Tensor] = []
        self._round_trip_graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        super().__init__(task, index, host)

    def work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def finish(self) -> None:
        self.stream.synchronize()
        self._in_flight.clear()

    def create_input(self, images: Tensor) -> Tensor:
        return torch.empty_like(images, device=self.device)

    def upload(self, host: TorchHostBuffers) -> None:
        self.input.copy_(host.images[self.image_slice], non_blocking=True)

    @cached_property
    def outputs(self) -> tuple[Tensor, Tensor]:
        return torch.empty_like(self.input), torch.empty_like(self.input)

    @cached_property
    def fastest(self) -> NamedMethod:
        return fastest_method(self.input, self.filters, self.outputs[0])

    @property
    def method(self) -> str:
        return self.fastest[0]

    def compute(self) -> None:
        self.result = self.fastest[1](self.input, self.filters, self.outputs[0])

    @cached_property
    def _chunks(self) -> list[slice]:
        return split_chunks(len(self.input), self.input[0].nbytes)

    def round_trip(self, host: TorchHostBuffers, copy_only: bool) -> Sequence[DeviceAction]:
        if not host.page_locked:  # copies block the host: nothing can overlap
            return super().round_trip(host, copy_only)
        return [partial(self._replay_round_trip, host, copy_only)]

    def overlap(self, host: TorchHostBuffers) -> str:
        if not host.page_locked or len(self._chunks) == 1:
            return ""
        return f"one graph of {len(self._chunks)} chunks per device: copies and kernels overlap"

    def _replay_round_trip(self, host: TorchHostBuffers, copy_only: bool) -> None:
        # One graph, because launching a chunk takes the host longer than the GPU needs for it.
        tensors = (host.images, host.results, self.input, self.filters)
        key = (copy_only, *(tensor.data_ptr() for tensor in tensors))
        if key in self._round_trip_graphs:
            self._round_trip_graphs[key].replay()
            return
        round_trip = partial(self._chunked_round_trip, host, copy_only)
        round_trip()
        self._round_trip_graphs[key] = capture_graph(round_trip)[0]

    def _chunked_round_trip(self, host: TorchHostBuffers, copy_only: bool) -> None:
        self._upload_stream.wait_stream(self.stream)
        for chunk in self._chunks:
            on_host = slice(
                self.image_slice.start + chunk.start, self.image_slice.start + chunk.stop
            )
            images = result = self.input[chunk]
            with torch.cuda.stream(self._upload_stream):
                images.copy_(host.images[on_host], non_blocking=True)
            self.stream.wait_stream(self._upload_stream)
            if not copy_only:
                result = self.fastest[1](images, self.filters, self.outputs[0][chunk])
            self._download_stream.wait_stream(self.stream)
            with torch.cuda.stream(self._download_stream):
                host.results[on_host].copy_(result, non_blocking=True)
            self._in_flight.append(result)
        self.stream.wait_stream(self._download_stream)


class TorchCudaKernelTimer(TorchCpuKernelTimer):
    device: TorchCudaDevice
    chain_length = 50

    def __init__(self, device: TorchCudaDevice) -> None:
        super().__init__(device)
        self.eviction_bytes = 8 * torch.cuda.get_device_properties(device.device).L2_cache_size

    def combine_seconds(self, seconds: Sequence[float]) -> float:
        return max(seconds)

    def time_action(self, action: Callable[[], object]) -> ReadSeconds:
        start, end = _event(), _event()
        start.record(self.device.stream)
        action()
        end.record(self.device.stream)
        return lambda: start.elapsed_time(end) / 1e3

    def launch_chain(self) -> Tensor:
        """Launch ``chain_length`` convolutions one by one and return the results."""
        images, (out, other) = self.device.input, self.device.outputs
        _, convolve = self.device.fastest
        for number in range(self.chain_length):
            images = convolve(images, self.mean_filters, out, backwards=number % 2 == 1)
            out, other = other, out
        return images

    @cached_property
    def chain_graph(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self.launch_chain()
        return capture_graph(self.launch_chain)

    def iterate(self) -> None:
        self.chain_graph[0].replay()

    def resident(self) -> ReadSeconds:
        graph, _ = self.chain_graph
        self.evict()
        read = self.time_action(graph.replay)
        return lambda: read() / self.chain_length


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def convolve_cudnn(
    images: Tensor, filters: Tensor, out: Tensor, *, backwards: bool = False
) -> Tensor:
    del out, backwards
    return convolve(images, filters)


def candidates(images: Tensor, filters: Tensor) -> dict[str, ConvMethod]:
    """Return cuDNN, then the Triton kernel's configurations if it supports the images."""
    found: dict[str, ConvMethod] = {"cuDNN": convolve_cudnn}
    with suppress(ImportError):
        from nfold.workloads.conv2d import triton_kernel

        if triton_kernel.supports(images, filters):
            configs = triton_kernel.kernel_configs(len(filters))
            found |= {config.name: triton_kernel.launcher(config) for config in configs}
    return found


FASTEST: dict[Hashable, NamedMethod] = {}  # by GPU and problem


def fastest_method(images: Tensor, filters: Tensor, out: Tensor) -> NamedMethod:
    """Return the fastest candidate on the current stream; times each problem once."""
    gpu = torch.cuda.get_device_name(images.device)
    problem = (gpu, images.dtype, tuple(images.shape), images.stride(), tuple(filters.shape))
    if problem not in FASTEST:

        def seconds(method: ConvMethod) -> float:
            return time_method(partial(method, images, filters, out))

        FASTEST[problem] = fastest(candidates(images, filters), seconds)
    return FASTEST[problem]


def capture_graph(action: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
    """Capture an action on the current stream; returns the graph and the action's result.

    The action must have run before: a capture must not compile or search.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = action()
    return graph, result


def time_method(call: Callable[[], Tensor]) -> float:
    """Return the seconds of a call, from the fastest replay of a graph of SEARCH_CALLS calls."""

    def calls() -> Tensor:
        for _ in range(SEARCH_CALLS - 1):
            call()
        return call()

    calls()
    graph, _ = capture_graph(calls)
    times: list[float] = []
    for _ in range(1 + SEARCH_REPLAYS):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times) / SEARCH_CALLS


def fastest(candidates: Mapping[str, M], seconds: Callable[[M], float]) -> tuple[str, M]:
    """Return the fastest candidate; the first in a tie.

    Skips candidates that raise, because compilers differ; an error of the first is not caught.
    """
    best, *others = candidates.items()
    best_seconds = seconds(best[1]) if others else 0.0
    for other in others:
        try:
            other_seconds = seconds(other[1])
        except Exception:  # noqa: S112
            continue
        if other_seconds < best_seconds:
            best, best_seconds = other, other_seconds
    return best


MAX_CHUNKS = 8  # more gain little: the first upload and last download are an eighth each
MIN_CHUNK_BYTES = 2**20  # one way; each copy has a fixed cost of microseconds


def split_chunks(images: int, image_bytes: int) -> list[slice]:
    """Split images into consecutive chunks; sizes differ by at most one image."""
    count = max(1, min(MAX_CHUNKS, images, images * image_bytes // MIN_CHUNK_BYTES))
    edges = [index * images // count for index in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def run_parts(task: Task, clock: Clock = time.monotonic) -> ConvResult:
    """Time every part on one rank; ``clock`` is the host's monotonic clock in seconds.

    Raises Mismatch for a result that differs from scipy's.
    """
    cuda = task.devices[0].type == "cuda"
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = task.plan.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = task.plan.precision == "tf32"
    indices = range(task.device_images[0].start, task.device_images[-1].stop)
    images = to_tensor(task.problem.make_images(indices), task.plan)
    host = TorchHostBuffers(images=images, results=torch.empty_like(images), in_place=not cuda)

    def peak_memory_bytes() -> int:
        reserved = [torch.cuda.max_memory_reserved(device) for device in task.devices if cuda]
        return max(reserved) if cuda else machine.peak_resident_bytes()

    task.barrier()
    return run_rank(
        task,
        TorchCudaDevice if cuda else TorchCpuDevice,
        TorchCudaKernelTimer if cuda else TorchCpuKernelTimer,
        {"pageable" if cuda else "": host},
        more_hosts=lambda: {"pinned": host.pinned()} if cuda else {},
        libraries={**SCIPY_LIBRARIES, **torch_on_cpu(task.cores)},
        first_call_note=_first_call_note(cuda),
        peak_memory_bytes=peak_memory_bytes,
        clock=clock,
    )


def _first_call_note(cuda: bool) -> str:
    if not cuda:
        return "allocation and computation"
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return (
        f"{'' if initialized else 'CUDA initialization, '}allocation, pageable copies, "
        "convolution; cuDNN initialization and search; with Triton, kernel compilation and search"
    )


def torch_on_cpu(threads: int) -> dict[str, Convolve]:
    """Return torch's float32 convolution on ``threads`` cores, by its name."""

    def on_cpu(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
        with _threads(threads):
            tensors = map(torch.from_numpy, (images, to_correlation(filters)))
            return to_float32(convolve(*tensors))

    noun = "thread" if threads == 1 else "threads"
    return {f"torch on the CPU, {threads} {noun}": on_cpu}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
