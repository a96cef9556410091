"""The parameters of a script before their first step, also of parts that are unfrozen later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from nfold.instrument.trained_model import InitialParameters


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.backbone(values))
        return found


def train(steps: int, unfreeze_at: int, *, add_group: bool) -> tuple[Any, InitialParameters]:
    """Train with the optimizer's parameters recorded before every step; unfreeze the backbone."""
    model = Classifier()
    model.backbone.requires_grad_(False)
    found = InitialParameters(SimpleNamespace(modules=[model]))  # type: ignore[arg-type]
    trained = model.head.parameters() if add_group else model.parameters()
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in range(steps):
        if step == unfreeze_at:
            model.backbone.requires_grad_(True)
            if add_group:
                optimizer.add_param_group({"params": model.backbone.parameters()})
        model(torch.ones(1, 3)).sum().backward()
        found.record(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, found


def test_parts_have_the_step_from_which_they_are_trained() -> None:
    for add_group in (True, False):
        model, found = train(6, unfreeze_at=4, add_group=add_group)
        parts = {part.name: part for part in found.trained_parts([*model.parameters()])}
        assert (parts["backbone"].trained_from, parts["head"].trained_from) == (4, 0)


def test_initial_values_of_a_part_are_those_before_its_first_step() -> None:
    model, found = train(6, unfreeze_at=4, add_group=True)
    initial = {part.name: part.sample for part in found.parts}
    trained = {part.name: part.sample for part in found.trained_parts([*model.parameters()])}
    assert initial.keys() == {"backbone", "head"}
    assert all(initial[name] != trained[name] for name in initial)
