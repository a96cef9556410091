"""Forward and backward of a compiled model as graphs, with a recorder that works on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nfold.engines.torch.step.compiled_graphs import WARM_UP_CALLS, CompiledGraphs

CPU = torch.device("cpu")
Step = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


class RepeatedCall:
    """A graph whose replay calls the function again and fills the recorded outputs."""

    def __init__(self, call: Callable[[], Any], outputs: list[Any]) -> None:
        self._call, self._outputs = call, outputs

    def replay(self) -> None:
        for own, new in zip(self._outputs, self._call(), strict=True):
            if own is not new:
                own.copy_(new)

    def reset(self) -> None: ...


class CallRecorder:
    def __init__(self, device: torch.device) -> None: ...

    def run_on_capture_stream(self, call: Callable[[], Any]) -> Any:
        return call()

    def record(self, call: Callable[[], Any]) -> tuple[RepeatedCall, Any]:
        outputs = list(call())
        return RepeatedCall(call, outputs), outputs

    def pool_bytes(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def no_other_compilations() -> Iterator[None]:
    # TorchDynamo limits the compilations of one function, whatever their models.
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def once(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x).square().mean()


def two_forwards(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """As a discriminator of real and generated samples: the first is needed after the second."""
    return once(forward, x) + once(forward, x + 1)


def dropped_forward(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    forward(x + 1)
    return once(forward, x)


@pytest.mark.parametrize("step", [once, two_forwards, dropped_forward])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_replayed_model_trains_as_an_eager_one(step: Step, micro_batches: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    reference = copy.deepcopy(model)
    graphs = CompiledGraphs(CPU, CallRecorder)
    forward = graphs.compile(model.forward)
    for _ in range(WARM_UP_CALLS + 6):
        for _ in range(micro_batches):
            x = torch.randn(5, 8)
            for each in (forward, reference):
                step(each, x).backward()  # type: ignore[no-untyped-call]
        for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad)
        for parameter in (*model.parameters(), *reference.parameters()):
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    assert graphs.recorded == 2
    assert graphs.failure is None


def test_outputs_that_are_kept_do_not_change() -> None:
    graphs = CompiledGraphs(CPU, CallRecorder)
    layer = nn.Linear(4, 4)
    forward = graphs.compile(layer.forward)
    inputs = [torch.randn(3, 4) for _ in range(WARM_UP_CALLS + 4)]
    outputs = []
    for x in inputs:
        outputs.append(forward(x))
        outputs[-1].sum().backward()
    assert graphs.recorded == 2
    for x, out in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(out, layer(x))


def test_moved_parameters_are_used_without_a_graph() -> None:
    graphs = CompiledGraphs(CPU, CallRecorder)
    layer = nn.Linear(4, 4)
    forward = graphs.compile(layer.forward)
    for number in range(WARM_UP_CALLS + 14):
        if number == WARM_UP_CALLS + 2:
            layer.weight.data = layer.weight.data.clone() + 1
        x = torch.randn(3, 4)
        out = forward(x)
        torch.testing.assert_close(out, layer(x))
        out.sum().backward()
    assert graphs.failure == "the addresses of parameters changed"


def test_closed_graphs_are_not_replayed() -> None:
    graphs = CompiledGraphs(CPU, CallRecorder)
    layer = nn.Linear(4, 4)
    forward = graphs.compile(layer.forward)
    for number in range(WARM_UP_CALLS + 4):
        if number == WARM_UP_CALLS + 2:
            graphs.close()
            layer.weight.data = layer.weight.data.clone() + 1
        x = torch.randn(3, 4)
        out = forward(x)
        torch.testing.assert_close(out, layer(x))
        out.sum().backward()
    assert graphs.recorded == 2
    assert graphs.failure is None


def test_a_model_that_computes_on_another_device_is_compiled_only() -> None:
    graphs = CompiledGraphs(torch.device("meta"), CallRecorder)
    layer = nn.Linear(4, 4)
    forward = graphs.compile(layer.forward)
    for _ in range(WARM_UP_CALLS + 2):
        x = torch.randn(3, 4)
        torch.testing.assert_close(forward(x), layer(x))
    assert graphs.recorded == 0
    assert graphs.failure is not None
