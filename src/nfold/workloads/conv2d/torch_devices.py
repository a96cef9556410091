"""The convolution by torch: how values are kept, and a CPU device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from nfold.core.plan import Plan
from nfold.workloads.conv2d.device import ConvDevice, DeviceAction, HostBuffers, ReadSeconds
from nfold.workloads.conv2d.problem import AnyFloat, Array, ConvProblem, to_correlation

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
MEMORY_FORMATS = {"channels_first": torch.contiguous_format, "channels_last": torch.channels_last}
IMAGE_COPIES = 3  # sets of images that take turns, so that no call meets those of the call before


@dataclass(frozen=True, kw_only=True)
class TensorFormat:
    """How a precision and a layout keep values: their type, and the order of the axes."""

    dtype: torch.dtype
    memory_format: torch.memory_format

    @classmethod
    def of(cls, plan: Plan) -> TensorFormat:
        """The form that a complete plan asks for."""
        assert plan.precision is not None
        assert plan.layout is not None
        return cls(dtype=DTYPES[plan.precision], memory_format=MEMORY_FORMATS[plan.layout])

    def tensor(self, values: AnyFloat, device: torch.device | None = None) -> Tensor:
        """The values [n, c, h, w] in this form."""
        made = torch.from_numpy(values).to(device=device, dtype=self.dtype)
        return made.contiguous(memory_format=self.memory_format)


@dataclass(frozen=True, kw_only=True)
class TorchHostBuffers(HostBuffers):
    """Images and results [n, c, h, w] of one process."""

    images: Tensor
    results: Tensor
    page_locked: bool = False

    def pinned(self) -> TorchHostBuffers:
        """The same in page-locked memory."""
        images, results = self.images.pin_memory(), self.results.pin_memory()
        return TorchHostBuffers(images=images, results=results, page_locked=True)

    def inputs(self, places: Sequence[int]) -> Array:
        return to_float32(self.images, places)

    def outputs(self, places: Sequence[int]) -> Array:
        return to_float32(self.results, places)

    def fill_nan(self) -> None:
        self.results.fill_(torch.nan)


def to_float32(values: Tensor, places: Sequence[int]) -> Array:
    """Some of the values as float32."""
    found: Array = values[list(places)].float().contiguous().numpy()
    return found


def convolve(images: Tensor, filters: Tensor) -> Tensor:
    """Correlation of the same size, summed over input channels.

    An even filter has no middle. scipy's ``same``, for a convolution, pads one pixel more
    before than after; torch's own would pad it after.
    """
    before, after = filters.shape[-1] // 2, (filters.shape[-1] - 1) // 2
    if before == after:
        return functional.conv2d(images, filters, padding=before)
    return functional.conv2d(functional.pad(images, (before, after) * 2), filters)


class TorchCpuDevice(ConvDevice[TorchHostBuffers]):
    """A CPU device with its share of the host's images, ``place`` of them."""

    def __init__(
        self,
        problem: ConvProblem,
        form: TensorFormat,
        device: torch.device,
        host: TorchHostBuffers,
        image_slice: slice,
    ) -> None:
        self.problem, self.form, self.device, self.image_slice = problem, form, device, image_slice
        with self.work():
            self.input = self.buffer(host.images[image_slice])
            self.result = self.input
            self.set_filters(problem.ones_filter())

    def buffer(self, images: Tensor) -> Tensor:
        """Where the device reads its images."""
        return images

    def set_filters(self, filters: Array) -> None:
        self.filters = self._on_device(filters)

    def _on_device(self, filters: Array) -> Tensor:
        return self.form.tensor(to_correlation(filters), self.device)

    def compute(self) -> None:
        self.result = convolve(self.input, self.filters)

    def pass_through(self) -> None:
        self.result = self.input

    def download(self, host: TorchHostBuffers) -> None:
        host.results[self.image_slice].copy_(self.result, non_blocking=True)

    @cached_property
    def _rotation(self) -> Iterator[Tensor]:
        return itertools.cycle([self.input, *(self.input.clone() for _ in range(IMAGE_COPIES - 1))])

    def rotate_images(self) -> None:
        self.input = next(self._rotation)

    @cached_property
    def _eviction(self) -> Tensor:
        return torch.empty(self.eviction_bytes, dtype=torch.uint8, device=self.device)

    def evict(self) -> None:
        self._eviction.zero_()

    @cached_property
    def _mean(self) -> Tensor:
        return self._on_device(self.problem.mean_filter())

    def iterate(self) -> None:
        images = self.input
        for _ in range(self.chain_length):
            images = convolve(images, self._mean)


# The convolution on a GPU: the faster of cuDNN and our own kernel, copies beside kernels.
#
# The first convolution of a problem searches: it times cuDNN and every variant of ``kernel.py`` on
# the lane's own images, compilation included. One launch from Python takes about as long as the
# kernel, so whatever runs many in a row is recorded as a CUDA graph and replayed.

# Convolves images [n, c, h, w] with filters [c out, c, k, k] and returns the results.
#
# They are in the third tensor where the method writes into memory that is there already
ConvMethod = Callable[..., Tensor]
R = TypeVar("R")
SEARCH_CALLS = 10
SEARCH_REPLAYS = 3


class TorchCudaDevice(TorchCpuDevice):
    """A GPU: its own streams, buffers that are allocated once, events for a clock."""

    chain_length = 50

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return self._new_stream()

    @cached_property
    def _upload_stream(self) -> torch.cuda.Stream:
        return self._new_stream()

    @cached_property
    def _download_stream(self) -> torch.cuda.Stream:
        return self._new_stream()

    def _new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()
        self._in_flight.clear()

    def combine_seconds(self, seconds: Sequence[float]) -> float:
        return max(seconds)

    def buffer(self, images: Tensor) -> Tensor:
        self.eviction_bytes = 8 * torch.cuda.get_device_properties(self.device).L2_cache_size
        return torch.empty_like(images, device=self.device)

    def upload(self, host: TorchHostBuffers) -> None:
        self.input.copy_(host.images[self.image_slice], non_blocking=True)

    @cached_property
    def _outputs(self) -> tuple[Tensor, Tensor]:
        return torch.empty_like(self.input), torch.empty_like(self.input)

    @cached_property
    def _method(self) -> ConvCandidate[ConvMethod]:
        return fastest_method(self.input, self.filters, self._outputs[0])

    @property
    def method(self) -> str:
        return self._method.name

    def compute(self) -> None:
        self.result = self._method.method(self.input, self.filters, self._outputs[0])

    def time_action(self, action: Callable[[], object]) -> ReadSeconds:
        start, end = _event(), _event()
        start.record(self._stream)
        action()
        end.record(self._stream)
        return lambda: start.elapsed_time(end) / 1e3

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)

    def launch_chain(self) -> Tensor:
        """The results of ``chain`` convolutions, launched one by one."""
        images, (out, spare) = self.input, self._outputs
        for number in range(self.chain_length):
            images = self._method.method(images, self._mean, out, backwards=number % 2 == 1)
            out, spare = spare, out
        return images

    @cached_property
    def chain_graph(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The chain as a graph, and where a replay leaves its results."""
        self.launch_chain()
        return capture_graph(self.launch_chain)

    def iterate(self) -> None:
        self.chain_graph[0].replay()

    def resident(self) -> ReadSeconds:
        graph, _ = self.chain_graph
        self.evict()
        read = self.time_action(graph.replay)
        return lambda: read() / self.chain_length

    @cached_property
    def _chunks(self) -> list[slice]:
        return split_chunks(len(self.input), self.input[0].nbytes)

    @cached_property
    def _in_flight(self) -> list[Tensor]:
        return []

    @cached_property
    def _round_trip_graphs(self) -> dict[Hashable, torch.cuda.CUDAGraph]:
        return {}

    def round_trip(self, host: TorchHostBuffers, copy_only: bool) -> Sequence[DeviceAction]:
        if not host.page_locked:
            return super().round_trip(host, copy_only)
        return [partial(self._replay_round_trip, host, copy_only)]

    def overlap(self, host: TorchHostBuffers) -> str:
        if not host.page_locked or len(self._chunks) == 1:
            return ""
        return f"one graph of {len(self._chunks)} chunks a device, whose copies and kernels overlap"

    def _replay_round_trip(self, host: TorchHostBuffers, copy_only: bool) -> None:
        used = (host.images, host.results, self.input, self.filters)
        name = (copy_only, *(tensor.data_ptr() for tensor in used))
        if name in self._round_trip_graphs:
            self._round_trip_graphs[name].replay()
            return
        way = partial(self._chunked_round_trip, host, copy_only)
        way()
        self._round_trip_graphs[name] = capture_graph(way)[0]

    def _chunked_round_trip(self, host: TorchHostBuffers, copy_only: bool) -> None:
        self._upload_stream.wait_stream(self._stream)
        for piece in self._chunks:
            self._process_chunk(host, piece, copy_only)
        self._stream.wait_stream(self._download_stream)

    def _process_chunk(self, host: TorchHostBuffers, piece: slice, copy_only: bool) -> None:
        there = slice(self.image_slice.start + piece.start, self.image_slice.start + piece.stop)
        images = self.input[piece]
        with torch.cuda.stream(self._upload_stream):
            images.copy_(host.images[there], non_blocking=True)
        self._stream.wait_stream(self._upload_stream)
        result = images if copy_only else self._convolve_piece(images, piece)
        self._download_stream.wait_stream(self._stream)
        with torch.cuda.stream(self._download_stream):
            host.results[there].copy_(result, non_blocking=True)
        self._in_flight.append(result)

    def _convolve_piece(self, images: Tensor, piece: slice) -> Tensor:
        return self._method.method(images, self.filters, self._outputs[0][piece])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def convolve_cudnn(
    images: Tensor, filters: Tensor, out: Tensor, *, backwards: bool = False
) -> Tensor:
    """cuDNN's convolution, into memory of its own, in an order of its own."""
    del out, backwards
    return convolve(images, filters)


def candidates(images: Tensor, filters: Tensor) -> list[ConvCandidate[ConvMethod]]:
    """cuDNN first; then our kernel, where Triton is installed and can index the images."""
    cudnn: ConvCandidate[ConvMethod] = ConvCandidate(name="cuDNN", method=convolve_cudnn)
    try:
        from nfold.workloads.conv2d import triton_kernel
    except ImportError:
        return [cudnn]
    if not triton_kernel.supports(images, filters):
        return [cudnn]
    variants = triton_kernel.kernel_configs(len(filters))
    return [
        cudnn,
        *(ConvCandidate(name=v.name, method=triton_kernel.launcher(v)) for v in variants),
    ]


FASTEST: dict[Hashable, ConvCandidate[ConvMethod]] = {}  # what this process found, by problem


def fastest_method(images: Tensor, filters: Tensor, out: Tensor) -> ConvCandidate[ConvMethod]:
    """The fastest candidate on the current stream; timed once per problem and kind of GPU."""

    def seconds(method: ConvMethod) -> float:
        return time_method(partial(method, images, filters, out))

    search = FastestSearch(seconds=seconds, cache=FASTEST)
    name = torch.cuda.get_device_name(images.device)
    problem = (name, images.dtype, tuple(images.shape), images.stride(), tuple(filters.shape))
    return search.choose(problem, candidates(images, filters))


def capture_graph(action: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
    """What an action queues on the current stream as a graph, and what it returned.

    The action must have run before: nothing may be compiled or searched for in a capture.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        made = action()
    return graph, made


def time_method(call: Callable[[], Tensor]) -> float:
    """The least mean of a few replays of ``SEARCH_CALLS`` calls, without launches from Python."""

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


M = TypeVar("M")


@dataclass(frozen=True, kw_only=True)
class ConvCandidate(Generic[M]):
    """A way to convolve, and what tables call it."""

    name: str
    method: M


@dataclass(frozen=True, kw_only=True)
class FastestSearch(Generic[M]):
    """Finds the fastest candidate, once per problem: ``seconds`` runs and times one."""

    seconds: Callable[[M], float]
    cache: dict[Hashable, ConvCandidate[M]] = field(default_factory=dict)

    def choose(self, problem: Hashable, candidates: Sequence[ConvCandidate[M]]) -> ConvCandidate[M]:
        """The fastest for this problem; the first one where none is faster or all others fail."""
        if problem not in self.cache:
            self.cache[problem] = fastest(candidates, self.seconds)
        return self.cache[problem]


def fastest(
    candidates: Sequence[ConvCandidate[M]], seconds: Callable[[M], float]
) -> ConvCandidate[M]:
    """The candidate of the least time; the first one runs everywhere, and wins a tie.

    A candidate that raises is out: compilers differ in what they refuse. The first one's error
    is the caller's.
    """
    best, *others = candidates
    least = seconds(best.method) if others else 0.0
    for other in others:
        taken = _seconds_or_infinity(other, seconds)
        if taken < least:
            best, least = other, taken
    return best


def _seconds_or_infinity(candidate: ConvCandidate[M], seconds: Callable[[M], float]) -> float:
    try:
        return seconds(candidate.method)
    except Exception:
        return math.inf


# More chunks gain little: the first upload and the last download, which nothing hides, are
# already an eighth each
MAX_CHUNKS = 8
MIN_CHUNK_BYTES = 2**20  # of a chunk one way: the copy engine pays some microseconds for each


def split_chunks(images: int, image_bytes: int) -> list[slice]:
    """Consecutive pieces of so many images, one at least; sizes differ by one image at most."""
    count = max(1, min(MAX_CHUNKS, images, images * image_bytes // MIN_CHUNK_BYTES))
    edges = [place * images // count for place in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]
