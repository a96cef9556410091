"""The convolution on a GPU: the faster of cuDNN and our own kernel, copies beside kernels.

The first convolution of a problem searches: it times cuDNN and every variant of ``kernel.py`` on
the lane's own images, compilation included. One launch from Python takes about as long as the
kernel, so whatever runs many in a row is recorded as a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from nfold.workloads.conv2d.chunks import split_chunks
from nfold.workloads.conv2d.cpu import TorchCpuDevice, TorchHostBuffers, convolve
from nfold.workloads.conv2d.lane import DeviceAction, ReadSeconds
from nfold.workloads.conv2d.search import ConvCandidate, FastestSearch

ConvMethod = Callable[..., Tensor]
"""Convolves images [n, c, h, w] with filters [c out, c, k, k] and returns the results.

They are in the third tensor where the method writes into memory that is there already.
"""
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
        """Everything goes to this device and its stream."""
        return torch.cuda.stream(self._stream)

    def finish(self) -> None:
        """Wait for the stream; what other streams still read may go then."""
        self._stream.synchronize()
        self._in_flight.clear()

    def combine_seconds(self, seconds: Sequence[float]) -> float:
        """GPUs of one process run at the same time: the slowest decides."""
        return max(seconds)

    def buffer(self, images: Tensor) -> Tensor:
        """Memory of the device, of the same shape and order."""
        self.eviction_bytes = 8 * torch.cuda.get_device_properties(self.device).L2_cache_size
        return torch.empty_like(images, device=self.device)

    def upload(self, host: TorchHostBuffers) -> None:
        """Copy this lane's images to the device."""
        self.input.copy_(host.images[self.image_slice], non_blocking=True)

    @cached_property
    def _outputs(self) -> tuple[Tensor, Tensor]:
        """Where results go; two, for a chain's results are the next one's images."""
        return torch.empty_like(self.input), torch.empty_like(self.input)

    @cached_property
    def _method(self) -> ConvCandidate[ConvMethod]:
        return fastest_method(self.input, self.filters, self._outputs[0])

    @property
    def method(self) -> str:
        """What convolves: cuDNN, or the variant of our kernel that was faster."""
        return self._method.name

    def compute(self) -> None:
        """Convolve the images."""
        self.result = self._method.method(self.input, self.filters, self._outputs[0])

    def time_action(self, action: Callable[[], object]) -> ReadSeconds:
        """Two events around what is queued; they are read once the stream is finished."""
        start, end = _event(), _event()
        start.record(self._stream)
        action()
        end.record(self._stream)
        return lambda: start.elapsed_time(end) / 1e3

    def peak_memory_bytes(self) -> int:
        """The most that torch's allocator held on this device."""
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
        """Convolve in a chain, with filters that keep it finite: one replay."""
        self.chain_graph[0].replay()

    def resident(self) -> ReadSeconds:
        """The mean of a chain, recorded before; the long write hides the replay's launch."""
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
        """From page-locked memory in chunks, each of which is copied while others are convolved.

        All of it is one graph, for the launches of a chunk take the host longer than the GPU
        needs for it. Copies from pageable memory block the host, so nothing would overlap.
        """
        if not host.page_locked:
            return super().round_trip(host, copy_only)
        return [partial(self._replay_round_trip, host, copy_only)]

    def overlap(self, host: TorchHostBuffers) -> str:
        """In how many chunks the way there and back runs."""
        if not host.page_locked or len(self._chunks) == 1:
            return ""
        return f"one graph of {len(self._chunks)} chunks a device, whose copies and kernels overlap"

    def _replay_round_trip(self, host: TorchHostBuffers, copy_only: bool) -> None:
        """The first time as it is written; what a graph reads and writes is part of its name."""
        used = (host.images, host.results, self.input, self.filters)
        name = (copy_only, *(tensor.data_ptr() for tensor in used))
        if name in self._round_trip_graphs:
            self._round_trip_graphs[name].replay()
            return
        way = partial(self._chunked_round_trip, host, copy_only)
        way()
        self._round_trip_graphs[name] = capture_graph(way)[0]

    def _chunked_round_trip(self, host: TorchHostBuffers, copy_only: bool) -> None:
        """Upload nothing before the stream has left the buffers; end when all is downloaded."""
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
        from nfold.workloads.conv2d import kernel
    except ImportError:
        return [cudnn]
    if not kernel.supports(images, filters):
        return [cudnn]
    variants = kernel.kernel_configs(len(filters))
    return [cudnn, *(ConvCandidate(name=v.name, method=kernel.launcher(v)) for v in variants)]


FASTEST: dict[Hashable, ConvCandidate[ConvMethod]] = {}
"""What this process found, by problem."""


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
