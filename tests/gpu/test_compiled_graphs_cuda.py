"""Compiled models whose forward and backward are CUDA graphs train as eager ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nfold.engines.torch.step import graph_outputs
from nfold.engines.torch.step.compiled_graphs import CompiledGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEPS = 16
Forward = Callable[[Tensor], Tensor]
Losses = tuple[list[float], list[float], CompiledGraphs]


@pytest.fixture(autouse=True)
def no_other_compilations() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class SmallNetwork(nn.Module):
    """Convolutions with batch norm, attention with dropout, and a classifier."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.attention = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        self.classifier = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.convolutions(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.classifier(self.attention(tokens).mean(1))
        return logits


def once(forward: Forward, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = forward(x)
    return functional.cross_entropy(logits.float(), labels), logits


def two_forwards(forward: Forward, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss, logits = once(forward, x, labels)
    return loss + once(forward, x.flip(0), labels)[0], logits


def dropped_forward(forward: Forward, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    forward(2 * x)
    return once(forward, x, labels)


def train(
    build: Callable[[CompiledGraphs, Forward], Forward],
    step: Callable[[Forward, Tensor, Tensor], tuple[Tensor, Tensor]] = once,
    *,
    dropout: float = 0.0,
    micro_batches: int = 1,
    set_to_none: bool = True,
    keeps_outputs: bool = True,
) -> Losses:
    """Return the losses, and the sums of outputs, which may be kept until the end."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = SmallNetwork(dropout).to(device)
    graphs = CompiledGraphs(device)
    forward = build(graphs, model.forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    losses, kept = [], []
    for _ in range(STEPS):
        for _ in range(micro_batches):
            x = torch.randn(64, 3, 16, 16, device=device)
            labels = torch.randint(0, 10, (64,), device=device)
            loss, logits = step(forward, x, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            kept.append(logits if keeps_outputs else logits.detach().double().sum())
            del loss, logits
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        if len(losses) % 5 == 0:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
    return [float(loss) for loss in losses], [float(each.double().sum()) for each in kept], graphs


def eagerly(graphs: CompiledGraphs, forward: Forward) -> Forward:
    del graphs
    return forward


@pytest.mark.parametrize("step", [once, two_forwards, dropped_forward])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_losses_are_those_of_eager_training(
    step: Callable[[Forward, Tensor, Tensor], tuple[Tensor, Tensor]],
    micro_batches: int,
    set_to_none: bool,
) -> None:
    losses, kept, graphs = train(
        CompiledGraphs.compile, step, micro_batches=micro_batches, set_to_none=set_to_none
    )
    expected, expected_kept, _ = train(
        eagerly, step, micro_batches=micro_batches, set_to_none=set_to_none
    )
    assert graphs.recorded == 2
    assert graphs.failure is None
    assert losses == pytest.approx(expected, rel=1e-3)
    assert kept == pytest.approx(expected_kept, rel=1e-2, abs=0.5)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_losses_are_those_of_eager_training_with_lent_outputs(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_outputs, "LENT_NUMBERS", 1)
    losses, sums, graphs = train(
        CompiledGraphs.compile, micro_batches=micro_batches, keeps_outputs=False
    )
    expected, expected_sums, _ = train(eagerly, micro_batches=micro_batches, keeps_outputs=False)
    assert graphs.recorded == 2
    assert graphs.failure is None
    assert losses == pytest.approx(expected, rel=1e-3)
    assert sums == pytest.approx(expected_sums, rel=1e-2, abs=0.5)


def test_dropout_draws_what_the_same_compiled_model_draws_without_graphs() -> None:
    def compiled_only(graphs: CompiledGraphs, forward: Forward) -> Forward:
        graphs.is_used = False
        return graphs.compile(forward)

    losses, _, graphs = train(CompiledGraphs.compile, dropout=0.2)
    expected, _, _ = train(compiled_only, dropout=0.2)
    assert graphs.recorded == 2
    assert losses == pytest.approx(expected, rel=1e-3)


def test_a_model_that_waits_for_the_device_trains_without_graphs() -> None:
    class Waiting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.abs().max() > 0)

    device = torch.device("cuda", torch.cuda.current_device())
    model = Waiting(8, 8).to(device)
    forward = CompiledGraphs(device).compile(model.forward)
    for _ in range(6):
        x = torch.randn(4, 8, device=device)
        out = forward(x)
        torch.testing.assert_close(out, functional.linear(x, model.weight, model.bias))
        out.sum().backward()
