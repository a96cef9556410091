"""The digits network in PyTorch: 49,738 parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from nfold.workloads.digits import CHANNELS, RATE, SIDE
from nfold.workloads.torch import cross_entropy, sgd

loss = cross_entropy


def model(_: Mapping[str, int], classes: int) -> nn.Module:
    """Images [n, 1, 8, 8] to logits [n, classes]."""
    return nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(CHANNELS * (SIDE // 2) ** 2, classes),
    )


def optimizer(module: nn.Module, _: Mapping[str, int]) -> torch.optim.Optimizer:
    """SGD at a fixed rate."""
    return sgd(module, RATE)
