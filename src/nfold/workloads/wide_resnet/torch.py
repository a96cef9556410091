"""Wide residual networks in PyTorch: pre-activation blocks, 36,479,194 parameters for 28-10."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nfold.workloads.torch import cross_entropy, sgd
from nfold.workloads.wide_resnet import (
    WIDE_RESNET_RATE,
    WIDE_RESNET_STAGES,
    WIDE_RESNET_WEIGHT_DECAY,
    blocks_per_stage,
)

wide_resnet_loss = cross_entropy


class WideResNetBlock(nn.Module):
    """Batch norm, ReLU, 3 × 3 convolution, twice, added to its input.

    Where the channels change, the first activation feeds the 1 × 1 shortcut as well.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.convolution1 = _wide_resnet_convolution(inputs, outputs, 3, stride)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.convolution2 = _wide_resnet_convolution(outputs, outputs, 3, 1)
        changes = inputs != outputs
        self.shortcut = _wide_resnet_convolution(inputs, outputs, 1, stride) if changes else None

    def forward(self, images: Tensor) -> Tensor:
        """Images [n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""
        active = torch.relu(self.norm1(images))
        kept = images if self.shortcut is None else self.shortcut(active)
        inner: Tensor = self.convolution1(active)
        added: Tensor = kept + self.convolution2(torch.relu(self.norm2(inner)))
        return added


def _wide_resnet_convolution(inputs: int, outputs: int, side: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, side, stride=stride, padding=side // 2, bias=False)


def wide_resnet_model(parameters: Mapping[str, int], classes: int) -> nn.Module:
    """Images [n, 3, 32, 32] to logits [n, classes]."""
    inputs = WIDE_RESNET_STAGES[0]
    layers: list[nn.Module] = [_wide_resnet_convolution(3, inputs, 3, 1)]
    for stage, base in enumerate(WIDE_RESNET_STAGES):
        outputs = base * parameters["width"]
        for block in range(blocks_per_stage(parameters["depth"])):
            layers.append(WideResNetBlock(inputs, outputs, 2 if stage and not block else 1))
            inputs = outputs
    layers += [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    module = nn.Sequential(*layers)
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return module


def wide_resnet_optimizer(module: nn.Module, _: Mapping[str, int]) -> torch.optim.Optimizer:
    """The paper's SGD with weight decay 5e-4 and its first learning rate, 0.1."""
    return sgd(module, WIDE_RESNET_RATE, weight_decay=WIDE_RESNET_WEIGHT_DECAY)
