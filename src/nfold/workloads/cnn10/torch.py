"""The ten-layer network in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from nfold.workloads.cnn10 import RATE, STAGES, WEIGHT_DECAY
from nfold.workloads.torch import cross_entropy, sgd

loss = cross_entropy


def model(_: Mapping[str, int], classes: int) -> nn.Module:
    """Images [n, 3, 32, 32] to logits [n, classes]."""
    layers: list[nn.Module] = []
    inputs = 3
    for stage, channels in enumerate(STAGES):
        if stage:
            layers.append(nn.AvgPool2d(2))
        for _layer in range(3):
            layers += _convolution(inputs, channels)
            inputs = channels
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers, *head)


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    """A convolution whose bias the batch norm after it stands in for."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def optimizer(module: nn.Module, _: Mapping[str, int]) -> torch.optim.Optimizer:
    """SGD at a fixed rate, with weight decay."""
    return sgd(module, RATE, weight_decay=WEIGHT_DECAY)
