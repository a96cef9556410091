"""Small fills of memory in a recorded CUDA graph, made kernels.

cuDNN clears some bytes before most of its convolutions. Recorded, that is a memset node, which
takes longer to start than a kernel does, most of all in a graph with branches: 15 of them cost a
step of cnn10 on four H200s 80 µs of 3.1 ms. torch's own fill kernel does the same.

Through the driver's C interface (CUDA Driver API, Graph Management), whose symbols without a
version are the ones before edges had data; a node whose edges have some is left as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from nfold.engines.torch.batch import Tensors, tensor_signature
from nfold.engines.torch.nested_tensors import map_tensors

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
    before = _nodes("cuGraphNodeGetDependencies", node)
    return before, _nodes("cuGraphNodeGetDependentNodes", node)


def _record_fills(memsets: Sequence[MemsetParameters]) -> torch.cuda.CUDAGraph:
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
    chain = []
    following = _nodes("cuGraphGetRootNodes", raw)
    while following:
        (node,) = following
        chain.append(node)
        following = _nodes("cuGraphNodeGetDependentNodes", node)
    return chain


def _replace(raw: int, node: int, kernel: int) -> None:
    parameters = ctypes.create_string_buffer(PARAMETER_BYTES)
    _call("cuGraphKernelNodeGetParams_v2", kernel, parameters)
    before, after = (_array(nodes) for nodes in _edges(node))
    made = ctypes.c_void_p()
    _call("cuGraphAddKernelNode_v2", ctypes.byref(made), raw, before, len(before), parameters)
    sources = _array([made.value] * len(after))
    _call("cuGraphAddDependencies", raw, sources, after, len(after))
    _call("cuGraphDestroyNode", node)


def _nodes(query: str, of: int) -> list[int]:
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


# CUDA graphs: a function of tensors is recorded once per shape and replayed from then on.
#
# The first calls with a shape run as they are, on the stream that is recorded later: they are
# real calls, in which libraries search, compile and allocate, so nothing has to be undone after
# them. What a recording needs is that the function waits for nothing and that everything that
# changes between calls is in its tensors.

WARM_UP_CALLS = 3
"""Calls with a shape before it is recorded."""
MAX_GRAPHS = 16
"""A function whose tensors have more shapes than this is left as it is."""

Function = Callable[..., Any]


class RecordedGraph(Protocol):
    """A recorded call."""

    def replay(self) -> None:
        """Queue the call again, on the tensors that it was recorded with."""

    def reset(self) -> None:
        """Give its memory back; it cannot be replayed afterwards."""


class GraphRecorder(Protocol):
    """What graphs are recorded with."""

    def run_on_capture_stream(self, call: Callable[[], Any]) -> Any:
        """Make a call in the place where calls are recorded."""

    def record(self, call: Callable[[], Any]) -> tuple[RecordedGraph, Any]:
        """Record a call without running it; returns what it would return, filled by a replay."""


class CudaGraphRecorder:
    """Records on one side stream, all graphs in one pool of memory.

    Graphs share the pool because no two run at once and what one returns is copied before the
    next runs. Errors are those of this thread alone: loaders pin memory in threads of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def run_on_capture_stream(self, call: Callable[[], Any]) -> Any:
        """Make the call on the side stream, in order with the current one."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = call()
        current.wait_stream(self._stream)
        return result

    def record(self, call: Callable[[], Any]) -> tuple[RecordedGraph, Any]:
        """Capture the call on the side stream."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        context = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        before = [state.clone_state() for state in torch.cuda.default_generators]
        error: list[Exception] = []
        try:
            with context:
                result = _keep_error(call, error)
        except Exception as ended:
            _restore_generators(before)
            raise CaptureFailed from (error[0] if error else ended)
        with torch.cuda.stream(self._stream):
            replace_small_memsets(graph)
        graph.instantiate()
        return graph, result

    def pool_bytes(self) -> int:
        """Memory that PyTorch's allocator reserves for the graphs; not to be asked in a step."""
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        own = tuple(self._pool)
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == own)


class CaptureFailed(Exception):
    """A call could not be recorded; its cause is what the call raised."""


def _keep_error(call: Callable[[], Any], error: list[Exception]) -> Any:
    try:
        return call()
    except Exception as raised:
        error.append(raised)
        raise


def _restore_generators(generators: Sequence[torch.Generator]) -> None:
    torch.cuda.synchronize()
    for own, before in zip(torch.cuda.default_generators, generators, strict=True):
        own.graphsafe_set_state(before)


class GraphReplay:
    """One recorded call: tensors to copy into, the graph, and what it fills."""

    def __init__(
        self, function: Function, tensors: Tensors, constants: Any, recorder: GraphRecorder
    ) -> None:
        self._inputs = [tensor.clone() for tensor in tensors]
        self._graph, self._result = recorder.record(lambda: function(*self._inputs, *constants))

    def __call__(self, tensors: Tensors) -> Any:
        pairs = [
            (mine, one) for mine, one in zip(self._inputs, tensors, strict=True) if one.numel()
        ]
        torch._foreach_copy_([mine for mine, _ in pairs], [one for _, one in pairs])
        self._graph.replay()
        return map_tensors(self._result, _copy)

    def reset(self) -> None:
        """Give the graph's memory back."""
        self._graph.reset()


class CapturedFunction:
    """A function of tensors and constants, replayed once its calls have been recorded.

    One graph for every set of shapes and constants. ``close`` before the process group ends: a
    living graph that holds a collective keeps it from ending.
    """

    def __init__(
        self, function: Function, recorder: GraphRecorder, warm_up: int = WARM_UP_CALLS
    ) -> None:
        self._function = function
        self._recorder = recorder
        self._warm_up = warm_up
        self._calls: dict[Hashable, int] = {}
        self._replays: dict[Hashable, GraphReplay] = {}

    def __call__(self, tensors: Tensors, *constants: Hashable) -> Any:
        key = _graph_key(tensors, constants)
        found = self._replays.get(key)
        if found is not None:
            return found(tensors)
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if calls <= self._warm_up or len(self._replays) >= MAX_GRAPHS:
            return self._recorder.run_on_capture_stream(
                lambda: self._function(*tensors, *constants)
            )
        made = self._replays[key] = GraphReplay(self._function, tensors, constants, self._recorder)
        return made(tensors)

    def is_warm(self, tensors: Tensors, *constants: Hashable) -> bool:
        """Whether calls of this form have been made so often that the next one is recorded."""
        return self._calls.get(_graph_key(tensors, constants), 0) >= self._warm_up

    def close(self) -> None:
        """Reset every graph."""
        for replay in self._replays.values():
            replay.reset()
        self._replays.clear()


def _copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_like(tensor)
    torch._foreach_copy_([copy], [tensor])
    return copy


def _graph_key(tensors: Tensors, constants: tuple[Hashable, ...]) -> Hashable:
    return (*(tensor_signature(tensor) for tensor in tensors), constants)


FUSED_OPTIMIZERS = (SGD, Adam, AdamW)
"""Whose fused kernel reads the learning rate from the device."""


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Let the optimizer step inside a graph, with the same results; again after a resume.

    A learning rate that is a number would be frozen into the graph, so it becomes a tensor,
    float32 [], which schedules fill in place.
    """
    for group in optimizer.param_groups:
        if type(optimizer) in FUSED_OPTIMIZERS:
            group["fused"], group["foreach"] = True, False
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        if "capturable" in group:  # asked for of fused kernels too, which always are
            group["capturable"] = True
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.device != device:
                state[name] = value.to(device)


def captured_settings(optimizer: Optimizer) -> Hashable:
    """What a graph of this optimizer's step holds fast: all of its settings but tensors."""
    return tuple(
        (name, _to_hashable(value))
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params" and not isinstance(value, Tensor)
    )


def _to_hashable(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value


def lr_versions(optimizer: Optimizer) -> list[int]:
    """How often each learning rate that is a tensor was changed in place."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate._version for rate in rates if isinstance(rate, Tensor)]
