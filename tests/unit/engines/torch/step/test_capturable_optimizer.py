"""Capturable optimizers step as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR

from nfold.engines.torch.step.cuda_graph import (
    captured_settings,
    complete_momentum,
    lr_versions,
    make_capturable,
    use_fused_kernels,
)

CPU = torch.device("cpu")
KINDS: tuple[Callable[[list[nn.Parameter]], Optimizer], ...] = (
    lambda own: SGD(own, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda own: Adam(own, lr=0.1),
    lambda own: AdamW(own, lr=0.1),
)


def _trained(kind: Callable[[list[nn.Parameter]], Optimizer], *, capturable: bool) -> torch.Tensor:
    weight = nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = kind([weight])
    schedule = StepLR(optimizer, step_size=2, gamma=0.5)
    if capturable:
        make_capturable(optimizer, CPU)
    for _ in range(6):
        optimizer.zero_grad()
        weight.square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return weight.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_schedules_are_the_same(kind: Callable[..., Optimizer]) -> None:
    expected = _trained(kind, capturable=False)
    assert torch.allclose(_trained(kind, capturable=True), expected, atol=1e-6)


def test_a_rate_becomes_a_tensor_that_schedules_fill() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    make_capturable(optimizer, CPU)
    rate = optimizer.param_groups[0]["lr"]
    schedule = StepLR(optimizer, step_size=1, gamma=0.5)
    before, settings = lr_versions(optimizer), captured_settings(optimizer)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05)
    assert lr_versions(optimizer) > before
    assert captured_settings(optimizer) == settings


def test_adam_becomes_capturable() -> None:
    """It refuses otherwise, its fused kernel too."""
    optimizer = Adam([nn.Parameter(torch.ones(1))], lr=0.1)
    make_capturable(optimizer, CPU)
    (group,) = optimizer.param_groups
    assert (group["fused"], group["capturable"]) == (True, True)


def test_other_optimizers_keep_a_rate_that_a_graph_holds_fast() -> None:
    optimizer = RMSprop([nn.Parameter(torch.ones(1))], lr=0.1)
    make_capturable(optimizer, CPU)
    settings = captured_settings(optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    assert optimizer.param_groups[0]["capturable"]
    assert captured_settings(optimizer) != settings


def _train_in_two_stages(
    optimizer: torch.optim.SGD, first: nn.Parameter, second: nn.Parameter
) -> Tensor:
    for step in range(4):
        first.grad = torch.full((2,), 1.0 + step)
        second.grad = torch.full((2,), 2.0) if step > 1 else None
        optimizer.step()
    return torch.cat([first.detach(), second.detach()])


def test_fused_sgd_takes_parameters_that_are_trained_later() -> None:
    results = []
    for fused in (False, True):
        first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9)
        if fused:
            use_fused_kernels(optimizer)
            complete_momentum(optimizer)
            assert optimizer.param_groups[0]["fused"]
        results.append(_train_in_two_stages(optimizer, first, second))
    assert torch.allclose(results[0], results[1])


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": False}, {"dampening": 0.5}])
def test_kernels_that_the_user_chose_are_kept(options: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9, **options)
    use_fused_kernels(optimizer)
    assert not optimizer.param_groups[0]["fused"]
