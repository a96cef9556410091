"""Loss scaling under fp16: gradients are not scaled, and an overflow skips one step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nfold.core.errors import UsageError
from nfold.engines.torch.precision import GROWTH_INTERVAL, INITIAL_SCALE, LossScale


def test_gradients_are_those_of_the_loss() -> None:
    scale, weight = LossScale(), nn.Parameter(torch.tensor([2.0]))
    scale.backward(3 * weight.sum(), [weight])
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0]


def test_an_overflow_keeps_no_gradient_and_halves_the_scale() -> None:
    scale, weight = LossScale(), nn.Parameter(torch.tensor([2.0]))
    scale.backward(weight.sum() * float("inf"), [weight])
    assert weight.grad is None
    assert scale.scale == INITIAL_SCALE / 2


def test_the_scale_grows_after_enough_good_steps() -> None:
    scale, weight = LossScale(), nn.Parameter(torch.tensor([2.0]))
    scale.load_state_dict({"scale": 8.0, "good_steps": GROWTH_INTERVAL - 1})
    scale.backward(weight.sum(), [weight])
    assert scale.state_dict() == {"scale": 16.0, "good_steps": 0}


def test_a_step_after_a_plain_backward_is_refused() -> None:
    scale, weight = LossScale(), nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scale.require_scaled_backward(optimizer)
    weight.sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(UsageError, match=r"run\.backward\(loss\)"):
        optimizer.step()
    scale.backward(weight.sum(), [weight])
    optimizer.step()


def test_every_optimizer_may_step_after_a_backward() -> None:
    scale, weights = LossScale(), [nn.Parameter(torch.tensor([2.0])) for _ in range(2)]
    both = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    for optimizer in both:
        scale.require_scaled_backward(optimizer)
    scale.backward(torch.stack([*weights]).sum(), weights)
    for optimizer in both:
        optimizer.step()
    assert [weight.item() for weight in weights] == [1.5, 1.5]
    with pytest.raises(UsageError, match=r"run\.backward\(loss\)"):
        both[1].step()


def test_backwards_without_a_step_between_them_add_up() -> None:
    scale = LossScale()
    weight, other = (nn.Parameter(torch.tensor([2.0])) for _ in range(2))
    scale.backward(3 * weight.sum() + other.sum(), [weight, other])
    scale.backward(4 * weight.sum(), iter([weight, other]))
    assert weight.grad is not None
    assert other.grad is not None
    assert (weight.grad.item(), other.grad.item()) == (7.0, 1.0)
