"""CUDA graphs of functions of tensors: recorded once per shape, replayed afterwards.

The first calls with a shape run eagerly on the capture stream: libraries search, compile and
allocate in them. Recording needs a function that waits for nothing and whose changing values are
all in its tensors.

Small fills of memory in a recorded graph are replaced by kernels. cuDNN clears some bytes before
most of its convolutions, which records memset nodes; these start more slowly than kernels, mainly in
a graph with branches: 15 of them cost a step of cnn10 on four H200s 80 µs of 3.1 ms. The replacement
uses the C interface of the driver (CUDA Driver API, Graph Management). Its functions without a
version suffix do not know edges with data: nodes with such edges are not replaced.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from nfold.engines.torch.batch import Tensors, tensor_signature
from nfold.engines.torch.nested_tensors import map_tensors
from nfold.engines.torch.step.activation_checkpointing import RandomDraws, checkpoints_recorded
from nfold.instrument import torch_private

MEMSET_NODE_TYPE = 2  # CUgraphNodeType
LOSSY_QUERY = 402  # error of the driver for edges with data
PARAMETER_BYTES = 256  # at least the size of CUDA_KERNEL_NODE_PARAMS_v2, which is copied unread
MAX_FILL_BYTES = 2**20  # larger fills are bound by memory, not by their start
# Bytes of an element to its name in the array interface, and the type of its value.
ELEMENT_TYPES = {1: ("|u1", ctypes.c_uint8), 2: ("<i2", ctypes.c_int16), 4: ("<i4", ctypes.c_int32)}
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
# All functions return 0 or an error number.
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
        return bool(self.height == 1 and self.width * self.element_bytes <= MAX_FILL_BYTES)

    @property
    def fill_value(self) -> int:
        return int(ELEMENT_TYPES[self.element_bytes][1](self.value).value)

    @property
    def tensor(self) -> Tensor:
        return torch.as_tensor(DeviceMemory(self), device="cuda")


class DeviceMemory:
    """Memory of the current device with the array interface that torch reads."""

    def __init__(self, memset: MemsetParameters) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memset.width,),
            "typestr": ELEMENT_TYPES[memset.element_bytes][0],
            "data": (memset.address, False),
            "version": 2,
        }


class CudaDriverError(Exception):
    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} returned {code}")
        self.code = code


def replace_small_memsets(graph: torch.cuda.CUDAGraph) -> int:
    """Replace the graph's small memset nodes by kernels; return their number.

    The graph must keep its nodes (``keep_graph``) and not be instantiated. The current stream must
    not be the default stream: kernels are recorded on it. Does nothing in builds without CUDA.
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
    successors = _nodes("cuGraphGetRootNodes", raw)
    while successors:
        (node,) = successors
        chain.append(node)
        successors = _nodes("cuGraphNodeGetDependentNodes", node)
    return chain


def _replace(raw: int, node: int, kernel: int) -> None:
    parameters = ctypes.create_string_buffer(PARAMETER_BYTES)
    _call("cuGraphKernelNodeGetParams_v2", kernel, parameters)
    before, after = (_array(nodes) for nodes in _edges(node))
    added = ctypes.c_void_p()
    _call("cuGraphAddKernelNode_v2", ctypes.byref(added), raw, before, len(before), parameters)
    sources = _array([added.value] * len(after))
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


WARM_UP_CALLS = 3  # calls with a shape before it is recorded
MAX_GRAPHS = 16  # a function with more shapes runs the others eagerly
MANY_FORMS = 32  # so many without a graph are reported
MAX_FORMS = 1024  # whose calls are counted; more are forgotten, so that memory is bounded

Function = Callable[..., Any]
Recording = Callable[[], AbstractContextManager[Callable[[], None]]]


class RecordedGraph(Protocol):
    def replay(self) -> None:
        """Queue the call again, on the tensors that it was recorded with."""

    def reset(self) -> None: ...


class GraphRecorder(Protocol):
    def run_on_capture_stream(self, call: Callable[[], Any]) -> Any: ...

    def record(self, call: Callable[[], Any]) -> tuple[RecordedGraph, Any]:
        """Record a call without running it; return the graph, and the result that a replay fills."""

    def pool_bytes(self) -> int:
        """Return the bytes that PyTorch's allocator reserves for the graphs; slow."""


class CudaGraphRecorder:
    """Records on one side stream, all graphs in one memory pool.

    Graphs share the pool because no two run at once and results are copied before the next runs.
    Capture errors are limited to this thread: loaders pin memory in other threads.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._random_draws = RandomDraws(device)

    def run_on_capture_stream(self, call: Callable[[], Any]) -> Any:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._random_draws.observe():
            result = call()
        current.wait_stream(self._stream)
        return result

    def record(self, call: Callable[[], Any]) -> tuple[RecordedGraph, Any]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        context = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        before = [state.clone_state() for state in torch.cuda.default_generators]
        error: Exception | None = None
        try:
            with context, checkpoints_recorded(draws_random_numbers=self._random_draws.found):
                try:
                    result = call()
                except Exception as raised:  # the context raises another one
                    error = raised
                    raise
        except Exception as ended:
            torch.cuda.synchronize()
            for own, state in zip(torch.cuda.default_generators, before, strict=True):
                own.graphsafe_set_state(state)
            raise CaptureFailed from (error or ended)
        with torch.cuda.stream(self._stream):
            replace_small_memsets(graph)
        graph.instantiate()
        return graph, result

    def pool_bytes(self) -> int:
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        own = tuple(self._pool)
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == own)


class CaptureFailed(Exception):
    """A call could not be recorded; its cause is the exception of the call."""

    @property
    def reason(self) -> str:
        cause = self.__cause__
        return str(cause).strip().split("\n")[0] or type(cause).__name__

    @property
    def is_out_of_memory(self) -> bool:
        return isinstance(self.__cause__, torch.cuda.OutOfMemoryError)


class GraphReplay:
    def __init__(
        self,
        function: Function,
        tensors: Tensors,
        constants: Any,
        recorder: GraphRecorder,
        recording: Recording,
    ) -> None:
        self._inputs = [tensor.clone() for tensor in tensors]
        with recording() as self._repeat:
            self._graph, self._result = recorder.record(lambda: function(*self._inputs, *constants))

    def __call__(self, tensors: Tensors) -> Any:
        pairs = [(own, new) for own, new in zip(self._inputs, tensors, strict=True) if new.numel()]
        torch_private.foreach_copy([own for own, _ in pairs], [new for _, new in pairs])
        self._graph.replay()
        self._repeat()
        return map_tensors(self._result, _copy)

    def reset(self) -> None:
        self._graph.reset()


@dataclass(eq=False)
class CapturedFunction:
    """A function of tensors and constants, replayed once its calls have been recorded.

    There is one graph for every form, a set of shapes and constants, at most ``max_graphs``.
    ``recording`` yields a function that is called after each replay, ``before_graph`` is called before
    a recording or a replay. ``on_eager`` is called once when there is no room for a further graph, and
    once when MANY_FORMS have no graph. Call ``close`` before the process group ends: a graph with a
    collective would block it.
    """

    function: Function
    recorder: GraphRecorder
    warm_up: int = WARM_UP_CALLS
    recording: Recording = lambda: nullcontext(lambda: None)
    on_eager: Callable[[], None] = lambda: None
    before_graph: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._calls: dict[Hashable, int] = {}
        self._replays: dict[Hashable, GraphReplay] = {}
        self._is_full = False
        self.max_graphs = MAX_GRAPHS
        self.forms = 0

    def __call__(self, tensors: Tensors, *constants: Hashable) -> Any:
        key = _graph_key(tensors, constants)
        if replay := self._replays.get(key):
            self.before_graph()
            return replay(tensors)
        calls = self._count_call(key)
        if calls <= self.warm_up or self._has_no_room():
            return self.recorder.run_on_capture_stream(lambda: self.function(*tensors, *constants))
        self.before_graph()
        replay = GraphReplay(self.function, tensors, constants, self.recorder, self.recording)
        self._replays[key] = replay
        return replay(tensors)

    def _has_no_room(self) -> bool:
        if self.graphs < self.max_graphs:
            return False
        if not self._is_full:
            self._is_full = True
            self.on_eager()
        return True

    def _count_call(self, key: Hashable) -> int:
        if key not in self._calls:
            self.forms += 1
            if self.forms == MANY_FORMS and not self._replays:
                self.on_eager()
            if len(self._calls) >= MAX_FORMS:
                self._calls.clear()
        self._calls[key] = self._calls.get(key, 0) + 1
        return self._calls[key]

    @property
    def graphs(self) -> int:
        return len(self._replays)

    def is_warm(self, tensors: Tensors, *constants: Hashable) -> bool:
        """Return whether the next call of this form is recorded."""
        return self._calls.get(_graph_key(tensors, constants), 0) >= self.warm_up

    def close(self) -> None:
        for replay in self._replays.values():
            replay.reset()
        self._replays.clear()
        self.max_graphs = MAX_GRAPHS


def _copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_like(tensor)
    torch_private.foreach_copy([copy], [tensor])
    return copy


def _graph_key(tensors: Tensors, constants: tuple[Hashable, ...]) -> Hashable:
    return (*(tensor_signature(tensor) for tensor in tensors), constants)


FUSED_OPTIMIZERS = (SGD, Adam, AdamW)  # their fused kernels read the learning rate from the device


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Let the optimizer step inside a graph, with the same results; again after a resume.

    A learning rate that is a number would be frozen into the graph: it becomes a tensor float32 [],
    which schedules fill in place.
    """
    for group in optimizer.param_groups:
        if type(optimizer) in FUSED_OPTIMIZERS:
            group["fused"], group["foreach"] = True, False
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        if "capturable" in group:  # torch requires it of fused kernels too
            group["capturable"] = True
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.device != device:
                state[name] = value.to(device)


def use_fused_kernels(optimizer: Optimizer) -> None:
    """Let an optimizer use its fused kernels on GPUs, unless the user chose others."""
    if type(optimizer) not in FUSED_OPTIMIZERS:
        return
    for group in optimizer.param_groups:
        chosen = group.get("differentiable") or (group.get("fused"), group.get("foreach"))
        if chosen == (None, None) and not group.get("dampening"):
            group["fused"] = True


def complete_momentum(optimizer: Optimizer) -> None:
    """Let SGD's fused kernel begin with a momentum of zero where a parameter has none.

    The kernel needs a momentum for all parameters or for none, but parameters that are trained later
    than others have none in their first step. Without dampening the first momentum is the same.
    """

    def complete(sgd: Optimizer, *_: Any) -> None:
        for group in sgd.param_groups:
            if not group["fused"] or not group["momentum"] or group["dampening"]:
                continue
            for parameter in group["params"]:
                state = sgd.state[parameter]
                if parameter.grad is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)

    if type(optimizer) is SGD:
        optimizer.register_step_pre_hook(complete)


def captured_settings(optimizer: Optimizer) -> Hashable:
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params" and not isinstance(value, Tensor)
    )


def lr_versions(optimizer: Optimizer) -> list[int]:
    """Return how often each learning rate that is a tensor was changed in place."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return [torch_private.version(rate) for rate in rates if isinstance(rate, Tensor)]
