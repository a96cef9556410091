"""The tutorial's network in PyTorch: 3,274,634 parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from nfold.workloads.mnist import MNIST_RATE
from nfold.workloads.torch import cross_entropy, sgd

mnist_loss = cross_entropy


def mnist_model(_: Mapping[str, int], classes: int) -> nn.Module:
    """Images [n, 1, 28, 28] to logits [n, classes]."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 1024),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.Linear(1024, classes),
    )


def mnist_optimizer(module: nn.Module, _: Mapping[str, int]) -> torch.optim.Optimizer:
    """SGD at a fixed rate."""
    return sgd(module, MNIST_RATE)
