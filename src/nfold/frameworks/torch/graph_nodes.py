"""Small fills of memory in a recorded CUDA graph, made kernels.

cuDNN clears some bytes before most of its convolutions. Recorded, that is a memset node, which
takes longer to start than a kernel does, most of all in a graph with branches: 15 of them cost a
step of cnn10 on four H200s 80 µs of 3.1 ms. torch's own fill kernel does the same.

Through the driver's C interface (CUDA Driver API, Graph Management), whose symbols without a
version are the ones before edges had data; a node whose edges have some is left as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

MEMSET_NODE_TYPE = 2
"""A kind of node (CUgraphNodeType)."""
LOSSY_QUERY = 402
"""The driver's answer where edges have data."""
PARAMETER_BYTES = 256
"""At least those of CUDA_KERNEL_NODE_PARAMS_v2, which goes from one graph to another unread."""
MAX_FILL_BYTES = 2**20
"""What is larger is bound by memory, not by its start."""
ELEMENT_TYPES = {1: ("|u1", ctypes.c_uint8), 2: ("<i2", ctypes.c_int16), 4: ("<i4", ctypes.c_int32)}
"""An element's bytes to its name in the array interface, and how to read its value."""
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
ARGUMENT_TYPES = {
    "cuGraphGetNodes": (_POINTER,) * 3,
    "cuGraphGetRootNodes": (_POINTER,) * 3,
    "cuGraphNodeGetDependencies": (_POINTER,) * 3,
    "cuGraphNodeGetDependentNodes": (_POINTER,) * 3,
    "cuGraphNodeGetType": (_POINTER,) * 2,
    "cuGraphMemsetNodeGetParams": (_POINTER,) * 2,
    "cuGraphKernelNodeGetParams_v2": (_POINTER,) * 2,
    "cuGraphAddKernelNode_v2": (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER),
    "cuGraphAddDependencies": (_POINTER, _POINTER, _POINTER, _SIZE),
    "cuGraphDestroyNode": (_POINTER,),
}
"""What the calls take; all return 0 or the number of an error."""


class MemsetParameters(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: ``height`` rows of ``width`` elements."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]

    @property
    def is_small(self) -> bool:
        """Whether a kernel is faster: one row of few bytes."""
        return bool(self.height == 1 and self.width * self.element_bytes <= MAX_FILL_BYTES)

    @property
    def fill_value(self) -> int:
        """The value as a number of its type."""
        return int(ELEMENT_TYPES[self.element_bytes][1](self.value).value)

    @property
    def tensor(self) -> Tensor:
        """The memory that is filled."""
        return torch.as_tensor(DeviceMemory(self), device="cuda")


class DeviceMemory:
    """Memory of the current device, as torch takes it from other libraries."""

    def __init__(self, memset: MemsetParameters) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memset.width,),
            "typestr": ELEMENT_TYPES[memset.element_bytes][0],
            "data": (memset.address, False),
            "version": 2,
        }


class CudaDriverError(Exception):
    """A call of the driver failed."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} returned {code}")
        self.code = code


def replace_small_memsets(graph: torch.cuda.CUDAGraph) -> int:
    """Replace the graph's small memset nodes; returns how many there were.

    The graph keeps its nodes (``keep_graph``) and is not instantiated yet. The current stream
    must not be the default one: kernels are recorded on it. Builds for other than NVIDIA's
    GPUs have none of these calls, and their graphs stay as they are.
    """
    if torch.version.cuda is None:
        return 0
    raw = graph.raw_cuda_graph()
    nodes = [node for node in _nodes("cuGraphGetNodes", raw) if _replaceable(node)]
    if nodes:
        recorded = _record_fills([_memset(node) for node in nodes])
        for node, kernel in zip(nodes, _linear_nodes(recorded.raw_cuda_graph()), strict=True):
            _replace(raw, node, kernel)
        recorded.reset()
    return len(nodes)


def _replaceable(node: int) -> bool:
    """Whether the node is a small fill whose edges can be copied."""
    kind = ctypes.c_int()
    _call("cuGraphNodeGetType", node, ctypes.byref(kind))
    if kind.value != MEMSET_NODE_TYPE or not _memset(node).is_small:
        return False
    try:
        _edges(node)
    except CudaDriverError as error:
        if error.code == LOSSY_QUERY:
            return False
        raise
    return True


def _memset(node: int) -> MemsetParameters:
    found = MemsetParameters()
    _call("cuGraphMemsetNodeGetParams", node, ctypes.byref(found))
    return found


def _edges(node: int) -> tuple[list[int], list[int]]:
    """The nodes that it waits for, and those that wait for it."""
    before = _nodes("cuGraphNodeGetDependencies", node)
    return before, _nodes("cuGraphNodeGetDependentNodes", node)


def _record_fills(memsets: Sequence[MemsetParameters]) -> torch.cuda.CUDAGraph:
    """A graph of one kernel per fill, in order."""
    fills = [(memset.tensor, memset.fill_value) for memset in memsets]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for tensor, number in fills:
            tensor.fill_(number)
    finally:
        graph.capture_end()
    return graph


def _linear_nodes(raw: int) -> list[int]:
    """The nodes of a graph without branches, in order."""
    chain = []
    following = _nodes("cuGraphGetRootNodes", raw)
    while following:
        (node,) = following
        chain.append(node)
        following = _nodes("cuGraphNodeGetDependentNodes", node)
    return chain


def _replace(raw: int, node: int, kernel: int) -> None:
    """Put a copy of ``kernel`` where the memset ``node`` is."""
    parameters = ctypes.create_string_buffer(PARAMETER_BYTES)
    _call("cuGraphKernelNodeGetParams_v2", kernel, parameters)
    before, after = (_array(nodes) for nodes in _edges(node))
    made = ctypes.c_void_p()
    _call("cuGraphAddKernelNode_v2", ctypes.byref(made), raw, before, len(before), parameters)
    sources = _array([made.value] * len(after))
    _call("cuGraphAddDependencies", raw, sources, after, len(after))
    _call("cuGraphDestroyNode", node)


def _nodes(query: str, of: int) -> list[int]:
    """What a query of the driver lists: it is asked for their number first."""
    count = ctypes.c_size_t()
    _call(query, of, None, ctypes.byref(count))
    nodes = _array([None] * count.value)
    if count.value:
        _call(query, of, nodes, ctypes.byref(count))
    return [node or 0 for node in nodes]


def _array(nodes: Sequence[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(nodes))(*nodes)


def _call(name: str, *arguments: object) -> None:
    function = getattr(_driver(), name)
    function.argtypes = ARGUMENT_TYPES[name]
    code = function(*arguments)
    if code:
        raise CudaDriverError(name, code)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
