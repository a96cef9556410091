"""Random numbers that a rank draws from step to step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from instrumented import CLASSES, FEATURES, dataset, instrumented, script_task


@pytest.mark.parametrize(
    ("noise", "dropout", "states"), [(0.1, 0.0, 2), (0.0, 0.0, 1), (0.1, 0.5, 0)]
)
def test_generators_change_only_if_the_loop_draws(
    noise: float, dropout: float, states: int
) -> None:
    """A model with dropout draws in every step: nothing is known then."""

    def training() -> None:
        module = nn.Sequential(nn.Dropout(dropout), nn.Linear(FEATURES, CLASSES))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        while True:
            for images, labels in DataLoader(dataset(), batch_size=4):
                noisy = images + noise * torch.randn_like(images) if noise else images
                loss = nn.functional.cross_entropy(module(noisy), labels)
                torch.autograd.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    found = instrumented(training, script_task(steps=3, warmup_steps=3)).samples
    assert found is not None
    assert len(set(found.generator_states)) == states
    assert len(found.input_hashes) == 2  # in the warm-up
