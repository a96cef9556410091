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

from nfold.workloads.conv2d.chunks import chunks
from nfold.workloads.conv2d.cpu import CpuLane, TorchHost, convolve
from nfold.workloads.conv2d.lane import Reading, Step
from nfold.workloads.conv2d.search import Candidate, Search

Method = Callable[..., Tensor]
"""Convolves images [n, c, h, w] with filters [c out, c, k, k] and returns the results.

They are in the third tensor where the method writes into memory that is there already.
"""
R = TypeVar("R")
SEARCH_CALLS = 10
SEARCH_REPLAYS = 3


class CudaLane(CpuLane):
    """A GPU: its own streams, buffers that are allocated once, events for a clock."""

    chain = 50

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return self._new_stream()

    @cached_property
    def _up(self) -> torch.cuda.Stream:
        return self._new_stream()

    @cached_property
    def _down(self) -> torch.cuda.Stream:
        return self._new_stream()

    def _new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def work(self) -> AbstractContextManager[object]:
        """Everything goes to this device and its stream."""
        return torch.cuda.stream(self._stream)

    def finish(self) -> None:
        """Wait for the stream; what other streams still read may go then."""
        self._stream.synchronize()
        self._read_later.clear()

    def together(self, seconds: Sequence[float]) -> float:
        """GPUs of one process run at the same time: the slowest decides."""
        return max(seconds)

    def buffer(self, images: Tensor) -> Tensor:
        """Memory of the device, of the same shape and order."""
        self.eviction_bytes = 8 * torch.cuda.get_device_properties(self.device).L2_cache_size
        return torch.empty_like(images, device=self.device)

    def upload(self, host: TorchHost) -> None:
        """Copy this lane's images to the device."""
        self.input.copy_(host.images[self.place], non_blocking=True)

    @cached_property
    def _out(self) -> tuple[Tensor, Tensor]:
        """Where results go; two, for a chain's results are the next one's images."""
        return torch.empty_like(self.input), torch.empty_like(self.input)

    @cached_property
    def _method(self) -> Candidate[Method]:
        return chosen(self.input, self.filters, self._out[0])

    @property
    def method(self) -> str:
        """What convolves: cuDNN, or the variant of our kernel that was faster."""
        return self._method.name

    def compute(self) -> None:
        """Convolve the images."""
        self.result = self._method.method(self.input, self.filters, self._out[0])

    def timed(self, action: Callable[[], object]) -> Reading:
        """Two events around what is queued; they are read once the stream is finished."""
        start, end = _event(), _event()
        start.record(self._stream)
        action()
        end.record(self._stream)
        return lambda: start.elapsed_time(end) / 1e3

    def peak_memory_bytes(self) -> int:
        """The most that torch's allocator held on this device."""
        return torch.cuda.max_memory_reserved(self.device)

    def chained(self) -> Tensor:
        """The results of ``chain`` convolutions, launched one by one."""
        images, (out, spare) = self.input, self._out
        for number in range(self.chain):
            images = self._method.method(images, self._mean, out, backwards=number % 2 == 1)
            out, spare = spare, out
        return images

    @cached_property
    def recorded(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The chain as a graph, and where a replay leaves its results."""
        self.chained()
        return record(self.chained)

    def iterate(self) -> None:
        """Convolve in a chain, with filters that keep it finite: one replay."""
        self.recorded[0].replay()

    def resident(self) -> Reading:
        """The mean of a chain, recorded before; the long write hides the replay's launch."""
        graph, _ = self.recorded
        self.evict()
        read = self.timed(graph.replay)
        return lambda: read() / self.chain

    @cached_property
    def _chunks(self) -> list[slice]:
        return chunks(len(self.input), self.input[0].nbytes)

    @cached_property
    def _read_later(self) -> list[Tensor]:
        return []

    @cached_property
    def _ways(self) -> dict[Hashable, torch.cuda.CUDAGraph]:
        return {}

    def there_and_back(self, host: TorchHost, copy_only: bool) -> Sequence[Step]:
        """From page-locked memory in chunks, each of which is copied while others are convolved.

        All of it is one graph, for the launches of a chunk take the host longer than the GPU
        needs for it. Copies from pageable memory block the host, so nothing would overlap.
        """
        if not host.page_locked:
            return super().there_and_back(host, copy_only)
        return [partial(self._replay_way, host, copy_only)]

    def overlap(self, host: TorchHost) -> str:
        """In how many chunks the way there and back runs."""
        if not host.page_locked or len(self._chunks) == 1:
            return ""
        return f"one graph of {len(self._chunks)} chunks a device, whose copies and kernels overlap"

    def _replay_way(self, host: TorchHost, copy_only: bool) -> None:
        """The first time as it is written; what a graph reads and writes is part of its name."""
        used = (host.images, host.results, self.input, self.filters)
        name = (copy_only, *(tensor.data_ptr() for tensor in used))
        if name in self._ways:
            self._ways[name].replay()
            return
        way = partial(self._in_chunks, host, copy_only)
        way()
        self._ways[name] = record(way)[0]

    def _in_chunks(self, host: TorchHost, copy_only: bool) -> None:
        """Upload nothing before the stream has left the buffers; end when all is downloaded."""
        self._up.wait_stream(self._stream)
        for piece in self._chunks:
            self._pass(host, piece, copy_only)
        self._stream.wait_stream(self._down)

    def _pass(self, host: TorchHost, piece: slice, copy_only: bool) -> None:
        there = slice(self.place.start + piece.start, self.place.start + piece.stop)
        images = self.input[piece]
        with torch.cuda.stream(self._up):
            images.copy_(host.images[there], non_blocking=True)
        self._stream.wait_stream(self._up)
        result = images if copy_only else self._convolve_piece(images, piece)
        self._down.wait_stream(self._stream)
        with torch.cuda.stream(self._down):
            host.results[there].copy_(result, non_blocking=True)
        self._read_later.append(result)

    def _convolve_piece(self, images: Tensor, piece: slice) -> Tensor:
        return self._method.method(images, self.filters, self._out[0][piece])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def with_cudnn(images: Tensor, filters: Tensor, out: Tensor, *, backwards: bool = False) -> Tensor:
    """cuDNN's convolution, into memory of its own, in an order of its own."""
    del out, backwards
    return convolve(images, filters)


def candidates(images: Tensor, filters: Tensor) -> list[Candidate[Method]]:
    """cuDNN first; then our kernel, where Triton is installed and can index the images."""
    cudnn: Candidate[Method] = Candidate(name="cuDNN", method=with_cudnn)
    try:
        from nfold.workloads.conv2d import kernel
    except ImportError:
        return [cudnn]
    if not kernel.supports(images, filters):
        return [cudnn]
    variants = kernel.variants(len(filters))
    return [cudnn, *(Candidate(name=v.name, method=kernel.launcher(v)) for v in variants)]


SEARCHES: dict[Hashable, Candidate[Method]] = {}
"""What this process found, by problem."""


def chosen(images: Tensor, filters: Tensor, out: Tensor) -> Candidate[Method]:
    """The fastest candidate on the current stream; timed once per problem and kind of GPU."""

    def seconds(method: Method) -> float:
        return seconds_per_call(partial(method, images, filters, out))

    search = Search(seconds=seconds, found=SEARCHES)
    name = torch.cuda.get_device_name(images.device)
    problem = (name, images.dtype, tuple(images.shape), images.stride(), tuple(filters.shape))
    return search.choose(problem, candidates(images, filters))


def record(action: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
    """What an action queues on the current stream as a graph, and what it returned.

    The action must have run before: nothing may be compiled or searched for in a capture.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        made = action()
    return graph, made


def seconds_per_call(call: Callable[[], Tensor]) -> float:
    """The least mean of a few replays of ``SEARCH_CALLS`` calls, without launches from Python."""

    def calls() -> Tensor:
        for _ in range(SEARCH_CALLS - 1):
            call()
        return call()

    calls()
    graph, _ = record(calls)
    times: list[float] = []
    for _ in range(1 + SEARCH_REPLAYS):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times) / SEARCH_CALLS
