"""Forward and backward of a compiled model as graphs, with a recorder that works on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nfold.engines.torch.step import compiled_graphs, graph_outputs
from nfold.engines.torch.step.compiled_graphs import WARM_UP_CALLS, CompiledGraphs
from nfold.engines.torch.step.graph_outputs import RELEASED_COPIES

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


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("step", [once, two_forwards, dropped_forward])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("lent_numbers", [1, 2**16])
def test_a_replayed_model_trains_as_an_eager_one(
    step: Step, micro_batches: int, lent_numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_outputs, "LENT_NUMBERS", lent_numbers)
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


@pytest.mark.parametrize("lent_numbers", [1, 2**16])
def test_outputs_that_are_kept_do_not_change(
    lent_numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_outputs, "LENT_NUMBERS", lent_numbers)
    graphs = CompiledGraphs(CPU, CallRecorder)
    layer = nn.Linear(4, 4)
    forward = graphs.compile(layer.forward)
    inputs = [torch.randn(3, 4) for _ in range(WARM_UP_CALLS + 8)]
    outputs = []
    for x in inputs:
        outputs.append(forward(x))
        outputs[-1].sum().backward()
    assert graphs.recorded == 2
    for x, out in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(out, layer(x))


class LossAndLogits(nn.Module):
    """As a language model that is given labels: most loops ignore the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layer(x)
        return logits.mean(), logits


def test_large_outputs_and_gradients_are_lent_and_unused_ones_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_outputs, "LENT_NUMBERS", 2)
    copied = []

    def foreach_copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        copied.append(sum(tensor.numel() for tensor in targets))
        torch._foreach_copy_(targets, sources)

    monkeypatch.setattr(compiled_graphs, "foreach_copy", foreach_copy)
    monkeypatch.setattr(graph_outputs, "foreach_copy", foreach_copy)
    graphs = CompiledGraphs(CPU, CallRecorder)
    model = LossAndLogits()
    reference = copy.deepcopy(model)
    forward = graphs.compile(model.forward)
    first_lent = WARM_UP_CALLS + RELEASED_COPIES
    addresses = []
    for number in range(first_lent + 6):
        uses_logits = number == first_lent + 3
        x = torch.randn(3, 4)
        for each in (reference, forward):
            loss, logits = each(x)
            (loss + logits.sum() if uses_logits else loss).backward()
            address = logits.data_ptr()
            del loss, logits
        for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad)
            own.grad = expected.grad = None
        if number >= first_lent:
            # The batch and the loss, then the gradient of the loss, and of logits that were used.
            assert copied == [12, 1, 13 if uses_logits else 1]
            addresses.append(address)
        copied.clear()
    assert graphs.recorded == 2
    assert graphs.failure is None
    assert len(set(addresses)) == 1


def test_a_lent_output_that_is_kept_does_not_change_and_later_ones_are_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_outputs, "LENT_NUMBERS", 1)
    graphs = CompiledGraphs(CPU, CallRecorder)
    layer = nn.Linear(4, 4)
    forward = graphs.compile(layer.forward)
    first_lent = WARM_UP_CALLS + RELEASED_COPIES
    kept = []
    for number in range(first_lent + 12):
        x = torch.randn(3, 4)
        out = forward(x)
        torch.testing.assert_close(out, layer(x))
        if number in (first_lent + 1, first_lent + 2) or number > first_lent + 6:
            kept.append((out, layer(x).detach()))
        if number == first_lent + 4:
            kept.clear()
        out.sum().backward()
        layer.zero_grad()
        del out
    assert len(kept) == 5
    for out, expected in kept:
        torch.testing.assert_close(out, expected)
    assert len({out.data_ptr() for out, _ in kept}) == 5
    assert graphs.recorded == 2
    assert graphs.failure is None


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
