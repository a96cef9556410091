"""Forward and backward of a compiled model, replayed as CUDA graphs in an unchanged training loop.

TorchDynamo's guards hold for every call: a graph is one compiled function with its shapes and
constants. Between Inductor and AOTAutograd its calls are recorded: parameters, buffers and what the
forward saved for the backward keep their addresses, other inputs are copied into buffers, and what
user code can hold is copied out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.weak import TensorWeakRef

from nfold.engines.torch.step.cuda_graph import CaptureFailed, CudaGraphRecorder, GraphRecorder
from nfold.instrument.torch_private import foreach_copy, mark_boxed, wrap_inductor

WARM_UP_CALLS = 2
MAX_MISSES = 8  # consecutive calls with other addresses, after which the graph is given up

RecorderFactory = Callable[[torch.device], GraphRecorder]


class CompiledGraphs:
    """The CUDA graphs of one compiled model; a backend of ``torch.compile``.

    ``is_used``: otherwise what was compiled runs. ``failure``: why some part is not replayed, or
    None. ``recorded``: number of graphs so far.
    """

    def __init__(
        self, device: torch.device, build_recorder: RecorderFactory = CudaGraphRecorder
    ) -> None:
        self.is_used = True
        self.failure: str | None = None
        self.recorded = 0
        self._device = device
        self._build_recorder = build_recorder
        self._replayed: list[ReplayedFunction] = []

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function compiled, with graphs of its own."""

        def backend(graph_module: GraphModule, inputs: Any) -> Any:
            # Memory of a forward and its backward is not shared with others: they may run in
            # another order than they were recorded in.
            pair = ForwardAndBackward(self, self._build_recorder(self._device), self._device)
            return wrap_inductor(graph_module, inputs, pair.wrap)

        return torch.compile(function, backend=backend)

    def add(self, replayed: ReplayedFunction) -> None:
        self._replayed.append(replayed)

    def close(self) -> None:
        """Free the graphs and their memory; what was compiled runs without them from now on."""
        self.is_used = False
        for replayed in self._replayed:
            replayed.free()


class ForwardAndBackward:
    """A forward and its backward: one memory pool, and which saved tensors are still needed."""

    def __init__(
        self, owner: CompiledGraphs, recorder: GraphRecorder, device: torch.device
    ) -> None:
        self.owner = owner
        self.recorder = recorder
        self.device = device
        self.saved: int | None = None  # outputs of the forward that the backward takes
        self._pending: TensorWeakRef | None = None

    def wrap(
        self, module: GraphModule, compiled: Callable[..., Any], static: set[int], backward: bool
    ) -> Callable[..., Any]:
        """Return a compiled function as one that is replayed, if its tensors are on the device."""
        nodes = module.graph.nodes
        if reason := _obstacle(nodes, self.device):
            self.owner.failure = reason
            return compiled
        if backward:
            names = [node.name for node in nodes if node.op == "placeholder"]
            static = {i for i, name in enumerate(names) if "tangents" not in name}
            self.saved = len(static)
        replayed = ReplayedFunction(self, compiled, static, is_backward=backward)
        self.owner.add(replayed)

        def call(inputs: list[Any]) -> Any:
            return replayed.call(inputs)

        return mark_boxed(call)

    @property
    def is_captured(self) -> bool:
        """Return whether a graph is being recorded that contains this call."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def wait_for_replays(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def is_pending(self) -> bool:
        """Return whether a backward may still read what the last replay of the forward saved."""
        return self._pending is not None and self._pending() is not None

    def watch(self, saved: Tensor) -> Tensor:
        """Return an alias of a saved tensor, whose life tells whether all of them are needed."""
        alias = saved.detach()
        self._pending = TensorWeakRef(alias)
        self._pending_address = alias.data_ptr()
        return alias

    def are_saved(self, inputs: list[Any]) -> bool:
        """Return whether a backward gets what the last replay of the forward saved."""
        return self.is_pending and self._pending_address in [one.data_ptr() for one in inputs]


class ReplayedFunction:
    """A compiled forward or backward: its first calls run, one is recorded, later ones are replayed."""

    def __init__(
        self,
        pair: ForwardAndBackward,
        compiled: Callable[..., Any],
        static: set[int],
        *,
        is_backward: bool,
    ) -> None:
        self._pair, self._compiled, self._static = pair, compiled, sorted(static)
        self._is_backward = is_backward
        self._calls = self._misses = 0
        self._is_open = True
        self._graph: Any = None

    def call(self, inputs: list[Any]) -> Any:
        """Compute the outputs; AOTAutograd wants the list of inputs to be emptied."""
        if not (self._is_open and self._pair.owner.is_used) or self._pair.is_captured:
            return self._compiled(inputs)
        self._calls += 1
        if self._graph is None:
            if self._calls <= WARM_UP_CALLS or not self._may_record(inputs):
                return self._pair.recorder.run_on_capture_stream(lambda: self._compiled(inputs))
            if not self._record(inputs):
                return self._compiled(inputs)
        elif not self._matches(inputs):
            return self._compiled(inputs)
        return self._replay(inputs)

    def _may_record(self, inputs: list[Any]) -> bool:
        """A backward is recorded on what a replay saved; until it is compiled, nobody knows what."""
        return self._pair.are_saved(inputs) if self._is_backward else self._pair.saved is not None

    def _record(self, inputs: list[Any]) -> bool:
        copied = sorted(set(range(len(inputs))) - set(self._static))
        buffers = {i: inputs[i].clone() for i in copied}
        if any(buffers[i].stride() != inputs[i].stride() for i in copied):
            return self._give_up("an input overlaps itself in memory")
        if any(tensor.device != self._pair.device for tensor in inputs):
            return self._give_up("an input is not on the device")
        # Aliases, so that the recording does not keep what the forward saved.
        own = [buffers.get(i, tensor.detach()) for i, tensor in enumerate(inputs)]
        try:
            self._graph, outputs = self._pair.recorder.record(lambda: self._compiled([*own]))
        except CaptureFailed as failed:
            return self._give_up(failed.reason)
        self._pair.owner.recorded += 1
        self._buffers = buffers
        self._addresses = [inputs[i].data_ptr() for i in self._static]
        self._outputs: list[Any] = list(outputs)
        inputs_by_id = {id(own[i]): i for i in self._static}
        self._returned = {
            k: inputs_by_id[id(out)] for k, out in enumerate(outputs) if id(out) in inputs_by_id
        }
        saved = 0 if self._is_backward else self._pair.saved or 0
        visible = range(len(self._outputs) - saved)
        self._copied = [k for k in visible if self._is_own(k)]
        kept = range(len(self._outputs) - saved, len(self._outputs))
        self._watched = next((k for k in kept if self._is_own(k)), None)
        return True

    def _is_own(self, k: int) -> bool:
        return isinstance(self._outputs[k], Tensor) and k not in self._returned

    def _matches(self, inputs: list[Any]) -> bool:
        """Return whether a replay computes this call, and overwrites nothing that is still needed."""
        if not self._is_backward and self._pair.is_pending:
            return False
        if [inputs[i].data_ptr() for i in self._static] == self._addresses:
            self._misses = 0
            return True
        self._misses += 1
        if self._misses >= MAX_MISSES:
            self._give_up("the addresses of parameters changed")
        return False

    def _replay(self, inputs: list[Any]) -> list[Any]:
        if self._buffers:
            foreach_copy([*self._buffers.values()], [inputs[i] for i in self._buffers])
        self._graph.replay()
        outputs = [*self._outputs]
        for k, i in self._returned.items():
            outputs[k] = inputs[i]
        inputs.clear()
        if self._copied:
            copies = [torch.empty_like(self._outputs[k]) for k in self._copied]
            foreach_copy(copies, [self._outputs[k] for k in self._copied])
            for k, copy in zip(self._copied, copies, strict=True):
                outputs[k] = copy
        if self._watched is not None:
            outputs[self._watched] = self._pair.watch(self._outputs[self._watched])
        return outputs

    def free(self) -> None:
        """Run all further calls without a graph."""
        self._is_open = False
        if self._graph is not None:
            self._pair.wait_for_replays()
            self._graph.reset()
            self._graph = self._outputs = self._buffers = None  # type: ignore[assignment]

    def _give_up(self, reason: str) -> bool:
        self._pair.owner.failure = reason
        self.free()
        return False


def _obstacle(nodes: Any, device: torch.device) -> str | None:
    """Return why a function cannot be a graph: what the host computes would be computed only once."""
    for node in nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and not isinstance(value, Tensor):
            return "shapes of its inputs vary"
        if any(one.device != device for one in _tensors(value)):
            return f"{_describe(node)} computes on another device"
    return None


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [one for one in values if isinstance(one, Tensor)]


def _describe(node: Node) -> str:
    return str(node.target) if node.op == "call_function" else node.name
