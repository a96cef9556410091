"""The ten-layer network in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from nfold.workloads.cnn10 import CNN10_RATE, CNN10_STAGES, CNN10_WEIGHT_DECAY
from nfold.workloads.torch import cross_entropy, sgd

cnn10_loss = cross_entropy


def cnn10_model(_: Mapping[str, int], classes: int) -> nn.Module:
    """Images [n, 3, 32, 32] to logits [n, classes]."""
    layers: list[nn.Module] = []
    inputs = 3
    for stage, channels in enumerate(CNN10_STAGES):
        if stage:
            layers.append(nn.AvgPool2d(2))
        for _layer in range(3):
            layers += _cnn10_convolution(inputs, channels)
            inputs = channels
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers, *head)


def _cnn10_convolution(inputs: int, outputs: int) -> list[nn.Module]:
    """A convolution whose bias the batch norm after it stands in for."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def cnn10_optimizer(module: nn.Module, _: Mapping[str, int]) -> torch.optim.Optimizer:
    """SGD at a fixed rate, with weight decay."""
    return sgd(module, CNN10_RATE, weight_decay=CNN10_WEIGHT_DECAY)
