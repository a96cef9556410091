"""Memory fills in a CUDA graph become kernels with the same effect."""

from __future__ import annotations

import ctypes

import pytest
import torch

from nfold.engines.torch.step.cuda_graph import MAX_FILL_BYTES, replace_small_memsets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SETTERS = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def memset(memory: torch.Tensor, value: int) -> None:
    """A fill by the driver on the current stream: in a capture a memset node."""
    setter = getattr(ctypes.CDLL("libcuda.so.1"), SETTERS[memory.element_size()])
    setter.argtypes = (ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p)
    stream = torch.cuda.current_stream().cuda_stream
    assert setter(memory.data_ptr(), value, memory.numel(), stream) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_a_fill_between_kernels_on_two_branches(dtype: torch.dtype) -> None:
    """Fills follow each other too: an edge between two nodes that are both replaced."""
    memory, other = (torch.zeros(1000, dtype=dtype, device="cuda") for _ in range(2))
    stream, side = new_stream(), new_stream()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        memory.add_(1)
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            memset(other, 7)
            other.add_(1)
        memset(memory, 5)
        memset(memory[:500], 9)
        memory.add_(2)
        stream.wait_stream(side)
        memory.add_(other)
    with torch.cuda.stream(stream):
        assert replace_small_memsets(graph) == 3
        assert replace_small_memsets(graph) == 0
    graph.instantiate()
    for _ in range(3):
        memory.fill_(100)
        graph.replay()
        torch.cuda.synchronize()
        assert memory.tolist() == [9 + 2 + 8] * 500 + [5 + 2 + 8] * 500


def replaced_in_a_graph_of(memory: torch.Tensor, value: int) -> int:
    """How many fills of a graph of one are made kernels; the graph has run when it returns."""
    stream = new_stream()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        memset(memory, value)
    with torch.cuda.stream(stream):
        replaced = replace_small_memsets(graph)
    graph.replay()
    torch.cuda.synchronize()
    return replaced


def test_what_is_large_stays() -> None:
    memory = torch.zeros(MAX_FILL_BYTES + 1, dtype=torch.uint8, device="cuda")
    assert replaced_in_a_graph_of(memory, 3) == 0
    assert bool((memory == 3).all())


def test_all_bits_of_a_value_arrive() -> None:
    memory = torch.zeros(10, dtype=torch.int32, device="cuda")
    assert replaced_in_a_graph_of(memory, 0xFFFFFFFE) == 1
    assert memory.tolist() == [-2] * 10
