"""CUDA graphs: a function of tensors is recorded once per shape and replayed from then on.

The first calls with a shape run as they are, on the stream that is recorded later: they are
real calls, in which libraries search, compile and allocate, so nothing has to be undone after
them. What a recording needs is that the function waits for nothing and that everything that
changes between calls is in its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nfold.frameworks.torch.batch import Tensors, tensor_signature
from nfold.frameworks.torch.graph_nodes import replace_small_memsets
from nfold.frameworks.torch.nested import map_tensors

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
    """Keep what the call raises: ending a broken capture raises an error of its own."""
    try:
        return call()
    except Exception as raised:
        error.append(raised)
        raise


def _restore_generators(generators: Sequence[torch.Generator]) -> None:
    """Give generators that a broken capture took with it the states that they had before."""
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
        """Replay with these tensors; returns copies that are the caller's own."""
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
        """The function of ``(*tensors, *constants)``."""
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
    """A copy made by a kernel: on a GPU ``clone`` is a node of its copy engine, 4 µs slower."""
    copy = torch.empty_like(tensor)
    torch._foreach_copy_([copy], [tensor])
    return copy


def _graph_key(tensors: Tensors, constants: tuple[Hashable, ...]) -> Hashable:
    return (*(tensor_signature(tensor) for tensor in tensors), constants)
