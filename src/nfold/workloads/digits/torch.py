"""The digits network in PyTorch: 49,738 parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from nfold.workloads.digits import DIGITS_CHANNELS, DIGITS_RATE, DIGITS_SIDE
from nfold.workloads.torch import cross_entropy, sgd

digits_loss = cross_entropy


def digits_model(_: Mapping[str, int], classes: int) -> nn.Module:
    """Images [n, 1, 8, 8] to logits [n, classes]."""
    return nn.Sequential(
        nn.Conv2d(1, DIGITS_CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(DIGITS_CHANNELS, DIGITS_CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(DIGITS_CHANNELS, DIGITS_CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(DIGITS_CHANNELS * (DIGITS_SIDE // 2) ** 2, classes),
    )


def digits_optimizer(module: nn.Module, _: Mapping[str, int]) -> torch.optim.Optimizer:
    """SGD at a fixed rate."""
    return sgd(module, DIGITS_RATE)
