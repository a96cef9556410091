"""The one-cycle learning rate: its shape, and that it reaches the optimizer."""

from __future__ import annotations

import copy

import pytest
import torch

from nfold.engines.builtin_workloads import one_cycle
from nfold.engines.torch.lr_schedule import ConstantLearningRate, OneCycleLearningRate

CPU = torch.device("cpu")


def _sgd() -> torch.optim.SGD:
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.3, fused=True)


def test_it_rises_for_a_fifth_and_falls_to_nothing() -> None:
    assert [one_cycle(p) for p in (0, 0.1, 0.2, 0.6, 1)] == pytest.approx([0, 0.5, 1, 0.5, 0])


def test_every_step_has_the_rate_of_its_middle_and_the_optimizer_takes_it() -> None:
    optimizer = _sgd()
    cycle = OneCycleLearningRate(optimizer, 0.5, 10, CPU)
    taken = []
    for step in range(10):
        before = float(optimizer.param_groups[0]["params"][0].detach())
        cycle.set_step(step)
        optimizer.step()
        taken.append(before - float(optimizer.param_groups[0]["params"][0].detach()))
    expected = [0.5 * one_cycle((step + 0.5) / 10) for step in range(10)]
    assert taken == pytest.approx(expected, rel=1e-4)


def test_a_rate_from_a_checkpoint_is_filled_too() -> None:
    optimizer = _sgd()
    cycle = OneCycleLearningRate(optimizer, 0.5, 10, CPU)
    cycle.set_step(0)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    cycle.set_step(2)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.5 * one_cycle(0.25))


def test_a_fixed_rate_stays() -> None:
    optimizer = _sgd()
    ConstantLearningRate().set_step(3)
    assert optimizer.param_groups[0]["lr"] == 0.3
