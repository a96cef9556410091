from __future__ import annotations

import pytest
import torch
from torch import nn

from nfold.workloads.torch_networks import cross_entropy, sgd


def test_the_loss_is_the_mean_over_the_batch() -> None:
    logits, labels = torch.randn(5, 10), torch.tensor([0, 3, 9, 1, 1])
    each = [-logits[i].log_softmax(0)[label] for i, label in enumerate(labels)]
    assert cross_entropy(logits, labels).item() == pytest.approx(torch.stack(each).mean().item())


def test_the_loss_of_half_precision_logits_is_in_float32() -> None:
    logits = torch.zeros(2, 10, dtype=torch.bfloat16)
    loss = cross_entropy(logits, torch.tensor([0, 1]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(2.302585, rel=1e-5)


def test_sgd_takes_nesterovs_step() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 1.0)
    optimizer = sgd(module, 0.1, weight_decay=0.5)
    module.weight.grad = torch.full((1, 1), 2.0)
    optimizer.step()
    # First step: gradient 2 + 0.5 × 1, momentum buffer the same, direction (1 + 0.9) × 2.5.
    assert module.weight.item() == pytest.approx(1 - 0.1 * 1.9 * 2.5)
