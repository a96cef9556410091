"""Steps in micro-batches equal whole steps, also for unusual scripts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nfold


def _trained(accumulate: int, leave_at: int | None = None) -> Tensor:
    """The weights after two epochs; the loop of the first is left at a batch, before its step."""
    torch.manual_seed(0)
    run, model = nfold.Run(device="cpu", accumulate=accumulate), nn.Linear(2, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = run.loader(torch.arange(16.0).view(8, 2), batch_size=4, shuffle=False)
    for epoch in range(2):
        for number, samples in enumerate(loader):
            optimizer.zero_grad()
            model(samples).mean().backward()
            if epoch == 0 and number == leave_at:
                break
            optimizer.step()
    weights: Tensor = model.weight.detach()
    return weights


@pytest.mark.parametrize("leave_at", [0, 1])
def test_a_step_that_was_left_in_the_middle_adds_nothing_to_the_next(leave_at: int) -> None:
    assert torch.allclose(_trained(2, leave_at=leave_at), _trained(1, leave_at=0))


def _thawed(accumulate: int) -> list[Tensor]:
    """The weights after an epoch with the first layer frozen, and one with the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    run = nfold.Run(device="cpu", accumulate=accumulate)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = run.loader(torch.arange(16.0).view(8, 2), batch_size=4, shuffle=False)
    for _ in range(2):
        for samples in loader:
            optimizer.zero_grad()
            model(samples).mean().backward()
            optimizer.step()
        model[0].requires_grad_(True)
        model[1].requires_grad_(False)
    return [parameter.detach() for parameter in model.parameters()]


def test_what_is_thawed_after_an_epoch_is_exchanged() -> None:
    for found, expected in zip(_thawed(2), _thawed(1), strict=True):
        assert torch.allclose(found, expected)
