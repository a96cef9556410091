"""Forward and backward of a compiled model, replayed as CUDA graphs in an unchanged training loop.

TorchDynamo's guards hold for every call: a graph is one compiled function with its shapes and
constants. Between Inductor and AOTAutograd its calls are recorded: parameters, buffers and what the
forward saved for the backward keep their addresses, other inputs are copied into buffers. Outputs
are copied out or lent; while one that was lent is in use, calls run without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.weak import TensorWeakRef

from nfold.engines.torch.nested_tensors import collect_tensors
from nfold.engines.torch.step.cuda_graph import CaptureFailed, CudaGraphRecorder, GraphRecorder
from nfold.engines.torch.step.graph_outputs import GraphOutputs
from nfold.instrument.torch_private import foreach_copy, mark_boxed, wrap_inductor

WARM_UP_CALLS = 2
MAX_MISSES = 8  # consecutive calls with other addresses, after which the graph is given up
BACKWARD_NODE = "CompiledFunctionBackward"  # AOTAutograd's, of a whole compiled function

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
        self._last_pair: ForwardAndBackward | None = None

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function compiled, with graphs of its own."""

        def backend(graph_module: GraphModule, inputs: Any) -> Any:
            # Memory of a forward and its backward is not shared with others: they may run in
            # another order than they were recorded in.
            pair = ForwardAndBackward(self, self._build_recorder(self._device), self._device)
            return wrap_inductor(graph_module, inputs, pair.wrap)

        compiled = torch.compile(function, backend=backend)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._last_pair = None
            outputs = compiled(*args, **kwargs)
            if self._last_pair is not None:
                self._last_pair.watch_gradients(outputs)
            return outputs

        return call

    def note_replay(self, pair: ForwardAndBackward) -> None:
        """Note whose forward was replayed last in the present call of the model."""
        self._last_pair = pair

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
        self._given: list[int] | None = None  # addresses of gradients that the backward gets

    def wrap(
        self, module: GraphModule, compiled: Callable[..., Any], static: set[int], backward: bool
    ) -> Callable[..., Any]:
        """Return a compiled function as one that is replayed, if its tensors are on the device."""
        nodes = module.graph.nodes
        if reason := _obstacle(nodes, self.device):
            self.owner.failure = reason
            return compiled
        names = [node.name for node in nodes if node.op == "placeholder"]
        if backward:
            static = {i for i, name in enumerate(names) if "tangents" not in name}
            self.saved = len(static)
        copied = set(range(len(names))) - static
        replayed = ReplayedFunction(self, compiled, static, copied, is_backward=backward)
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

    def watch_gradients(self, outputs: Any) -> None:
        """Note which gradients of a model's outputs exist when its backward begins."""
        for node in {out.grad_fn for out in collect_tensors(outputs)}:
            if node is not None and type(node).__name__ == BACKWARD_NODE:
                node.register_prehook(self._note_gradients)

    def _note_gradients(self, gradients: tuple[Tensor | None, ...]) -> None:
        self._given = [each.data_ptr() for each in gradients if each is not None]

    def take_unused(self, tangents: dict[int, Tensor]) -> set[int]:
        """Return which tangents are zeros that autograd made, as no gradient reached an output.

        Empty if that is not certain. A note of watch_gradients is for the next call only.
        """
        given, self._given = self._given, None
        if given is None:
            return set()
        unused = {i for i, tangent in tangents.items() if tangent.data_ptr() not in given}
        return unused if len(tangents) - len(unused) == len(given) else set()

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
        copied: set[int],
        *,
        is_backward: bool,
    ) -> None:
        self._pair, self._compiled = pair, compiled
        self._static, self._copied_in = sorted(static), sorted(copied)
        self._is_backward = is_backward
        self._calls = self._misses = 0
        self._is_open = True
        self._graph: Any = None

    def call(self, inputs: list[Any]) -> Any:
        """Compute the outputs; AOTAutograd wants the list of inputs to be emptied."""
        tangents = {i: inputs[i] for i in self._copied_in} if self._is_backward else {}
        unused = self._pair.take_unused(tangents)
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
        return self._replay(inputs, unused)

    def _may_record(self, inputs: list[Any]) -> bool:
        """A backward is recorded on what a replay saved; until it is compiled, nobody knows what."""
        return self._pair.are_saved(inputs) if self._is_backward else self._pair.saved is not None

    def _record(self, inputs: list[Any]) -> bool:
        buffers = {i: inputs[i].clone() for i in self._copied_in}
        if any(buffer.stride() != inputs[i].stride() for i, buffer in buffers.items()):
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
        self._zeros: set[int] = set()  # inputs whose buffers hold zeros
        self._addresses = [inputs[i].data_ptr() for i in self._static]
        self._outputs: list[Any] = list(outputs)
        inputs_by_id = {id(own[i]): i for i in self._static}
        self._returned = {
            k: inputs_by_id[id(out)] for k, out in enumerate(outputs) if id(out) in inputs_by_id
        }
        saved = 0 if self._is_backward else self._pair.saved or 0
        first_saved = len(self._outputs) - saved
        visible = [k for k in range(first_saved) if self._is_own(k)]
        self._handed_out = GraphOutputs(self._outputs, visible)
        kept = range(first_saved, len(self._outputs))
        self._watched = next((k for k in kept if self._is_own(k)), None)
        return True

    def _is_own(self, k: int) -> bool:
        return isinstance(self._outputs[k], Tensor) and k not in self._returned

    def _matches(self, inputs: list[Any]) -> bool:
        """Return whether a replay computes this call, and overwrites nothing that is still needed."""
        if not self._is_backward and self._pair.is_pending:
            return False
        if not self._handed_out.are_released():
            return False
        if [inputs[i].data_ptr() for i in self._static] == self._addresses:
            self._misses = 0
            return True
        self._misses += 1
        if self._misses >= MAX_MISSES:
            self._give_up("the addresses of parameters changed")
        return False

    def _replay(self, inputs: list[Any], unused: set[int]) -> list[Any]:
        self._handed_out.lend_released()
        for i in unused - self._zeros:
            self._buffers[i].zero_()
        self._zeros = unused
        if copied := [i for i in self._copied_in if i not in unused]:
            foreach_copy([self._buffers[i] for i in copied], [inputs[i] for i in copied])
        self._graph.replay()
        outputs = [*self._outputs]
        for k, i in self._returned.items():
            outputs[k] = inputs[i]
        inputs.clear()
        for k, output in self._handed_out.hand_out().items():
            outputs[k] = output
        if self._watched is not None:
            outputs[self._watched] = self._pair.watch(self._outputs[self._watched])
        if not self._is_backward:
            self._pair.owner.note_replay(self._pair)
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
