"""One update: micro-batches, usual and rare sizes, the epoch as a tensor."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nfold.engines.torch.batch import CurrentShare, Tensors, split_micro_batches
from nfold.engines.torch.communication.data_parallel import micro_batch_context
from nfold.engines.torch.communication.gradient_exchange import ExchangeWait
from nfold.engines.torch.lr_schedule import ConstantLearningRate, OneCycleLearningRate
from nfold.engines.torch.precision import Precision
from nfold.engines.torch.step.forward import Forward
from nfold.engines.torch.step.training_step import EpochTensor, TrainingStep
from nfold.workloads.torch_networks import sgd

CPU = torch.device("cpu")
NOW = torch.tensor(0)
NO_EXCHANGE = ExchangeWait(enabled=False)
HALF = tuple(
    dataclasses.replace(part, gradient_weight=0.5) for part in split_micro_batches(3, 0, 1, 1)
)


def _update(weight: nn.Parameter, taken: list[str]) -> TrainingStep:
    def way(name: str) -> Forward:
        def forward(tensors: Tensors, epoch: Tensor) -> Tensor:
            taken.append(name)
            return (weight * tensors[0].sum() + epoch).squeeze()

        return forward

    optimizer = torch.optim.SGD([weight], lr=0.1)
    slot = micro_batch_context(nn.Identity(), CurrentShare(1))
    precision = Precision("fp32", CPU)
    rate = ConstantLearningRate()
    return TrainingStep(
        way("usual"), way("rare"), {4}, precision, optimizer, slot, rate, NO_EXCHANGE
    )


def test_an_update_follows_the_weighted_gradient_and_returns_the_plain_loss() -> None:
    weight, taken = nn.Parameter(torch.ones(1)), list[str]()
    update = _update(weight, taken)
    loss = update((torch.ones(4),), torch.tensor(2), split_micro_batches(4, 0, 1, 1))
    assert (float(loss), loss.requires_grad) == (6.0, False)
    assert torch.allclose(weight.detach(), torch.tensor([0.6]))
    update((torch.ones(3),), NOW, HALF)
    assert torch.allclose(weight.detach(), torch.tensor([0.45]))
    assert taken == ["usual", "rare"]
    assert weight.grad is None
    assert update.graph_bytes() == 0


def test_parts_go_the_way_of_their_size() -> None:
    taken = list[str]()
    update = _update(nn.Parameter(torch.ones(1)), taken)
    update((torch.ones(7),), NOW, split_micro_batches(7, 0, 1, 2))
    assert taken == ["rare", "usual"]


def _trained(precision: str, accumulate: int, batches: list[Tensor]) -> tuple[list[float], Tensor]:
    """The losses of a linear layer's steps, and its weights after them."""
    torch.manual_seed(0)
    model, arithmetic = nn.Linear(3, 1), Precision(precision, CPU)

    def forward(tensors: Tensors, _: Tensor) -> Tensor:
        with arithmetic.forward():
            loss: Tensor = model(tensors[0]).float().square().mean()
        return loss

    slot = micro_batch_context(model, CurrentShare(1))
    rate, optimizer = ConstantLearningRate(), sgd(model, 0.05)
    update = TrainingStep(forward, forward, (), arithmetic, optimizer, slot, rate, NO_EXCHANGE)
    losses = list[float]()
    for batch in batches:
        parts = split_micro_batches(len(batch), 0, 1, accumulate)
        with NothingRead() if losses else nullcontext():  # type: ignore[no-untyped-call]
            loss = update((batch,), NOW, parts)
        losses.append(float(loss))
    return losses, model.weight.detach()


class NothingRead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """No value may go from the device to the host: a graph could not hold that."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("fp16", 2e-3)])
def test_parts_make_the_same_step_and_the_host_reads_nothing(
    precision: str, tolerance: float
) -> None:
    """fp16 is scaled, checked and stepped once, by the device alone."""
    torch.manual_seed(1)
    batches = [torch.randn(count, 3) for count in (8, 7, 8, 2)]
    whole, weight = _trained(precision, 1, batches)
    for accumulate in (2, 3):
        losses, other = _trained(precision, accumulate, batches)
        assert losses == pytest.approx(whole, rel=tolerance)
        assert torch.allclose(other, weight, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_first_step_that_overflows_leaves_everything_as_it_was(accumulate: int) -> None:
    """Momentum too, which a fused optimizer would have left unfilled."""
    torch.manual_seed(1)
    fine = torch.randn(4, 3)
    too_large = fine.clone()
    too_large[0] = 1e30
    junk = [torch.full((3,), float("nan")) for _ in range(100)]
    del junk
    _, skipped = _trained("fp16", accumulate, [too_large, fine])
    _, expected = _trained("fp16", accumulate, [fine])
    assert torch.allclose(skipped, expected, rtol=2e-3)


def test_an_epoch_is_made_into_a_tensor_once() -> None:
    now = EpochTensor(CPU)
    first = now(3)
    assert (int(first), first.dtype, first.dim()) == (3, torch.int64, 0)
    assert now(3) is first
    assert int(now(4)) == 4
    assert now(first) is first


def _cycled(chain: int) -> tuple[list[float], Tensor]:
    """The losses of six steps of a linear layer under one cycle, so many steps in a call."""
    torch.manual_seed(0)
    model, arithmetic = nn.Linear(3, 1), Precision("fp32", CPU)
    optimizer = sgd(model, 0.05)
    rate = OneCycleLearningRate(optimizer, 0.5, 6, CPU)

    def forward(tensors: Tensors, _: Tensor) -> Tensor:
        loss: Tensor = model(tensors[0]).square().mean()
        return loss

    slot = micro_batch_context(model, CurrentShare(1))
    update = TrainingStep(forward, forward, (), arithmetic, optimizer, slot, rate, NO_EXCHANGE)
    batches = [torch.full((4, 3), 0.1 * (number + 1)) for number in range(6)]
    losses = list[float]()
    for first in range(0, 6, chain):
        rate.set_step(first)
        tensors = [(batch,) for batch in batches[first : first + chain]]
        rates = rate.step_rates(first, chain)
        losses += update.run_many(tensors, NOW, split_micro_batches(4, 0, 1, 1), rates).tolist()
    return losses, model.weight.detach()


@pytest.mark.parametrize("chain", [2, 3])
def test_several_steps_in_a_call_each_have_their_own_rate(chain: int) -> None:
    losses, weight = _cycled(chain)
    one_device, other = _cycled(1)
    assert losses == pytest.approx(one_device, rel=1e-6)
    assert torch.equal(weight, other)
