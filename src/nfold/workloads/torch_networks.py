"""The image classification networks in PyTorch, with their losses and optimizers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from nfold.workloads import networks
from nfold.workloads.workload_info import WorkloadInfo


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits [n, classes] and labels [n], computed in float32."""
    return functional.cross_entropy(logits.float(), labels)


def sgd(
    module: nn.Module, learning_rate: float, *, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Create fused SGD with Nesterov momentum 0.9 and a fixed learning rate.

    Initializes the momentum with zeros: if fp16 skips the first step, the fused kernel would
    otherwise read uninitialized memory (torch 2.13).
    """
    optimizer = torch.optim.SGD(
        module.parameters(),
        lr=learning_rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=weight_decay,
        fused=True,
    )
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def create_optimizer(
    info: WorkloadInfo, module: nn.Module, _: Mapping[str, int]
) -> torch.optim.Optimizer:
    return sgd(module, info.learning_rate, weight_decay=info.weight_decay)


def digits_model(_: Mapping[str, int], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, networks.DIGITS_CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(networks.DIGITS_CHANNELS, networks.DIGITS_CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(networks.DIGITS_CHANNELS, networks.DIGITS_CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(networks.DIGITS_CHANNELS * (networks.DIGITS_SIDE // 2) ** 2, classes),
    )


def mnist_model(_: Mapping[str, int], classes: int) -> nn.Module:
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


def cnn10_model(_: Mapping[str, int], classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for stage, channels in enumerate(networks.CNN10_STAGES):
        if stage:
            layers.append(nn.AvgPool2d(2))
        for _layer in range(3):
            layers.append(nn.Conv2d(inputs, channels, 3, padding=1, bias=False))
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            inputs = channels
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers, *head)


class WideResNetBlock(nn.Module):
    """Pre-activation block; a 1 × 1 convolution in the shortcut if the channels change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.convolution1 = _wide_resnet_convolution(inputs, outputs, 3, stride)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.convolution2 = _wide_resnet_convolution(outputs, outputs, 3, 1)
        changes = inputs != outputs
        self.shortcut = _wide_resnet_convolution(inputs, outputs, 1, stride) if changes else None

    def forward(self, images: Tensor) -> Tensor:
        active = torch.relu(self.norm1(images))
        shortcut = images if self.shortcut is None else self.shortcut(active)
        inner: Tensor = self.convolution1(active)
        outputs: Tensor = shortcut + self.convolution2(torch.relu(self.norm2(inner)))
        return outputs


def _wide_resnet_convolution(inputs: int, outputs: int, side: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, side, stride=stride, padding=side // 2, bias=False)


def wide_resnet_model(parameters: Mapping[str, int], classes: int) -> nn.Module:
    inputs = networks.WIDE_RESNET_STAGES[0]
    layers: list[nn.Module] = [_wide_resnet_convolution(3, inputs, 3, 1)]
    for stage, base in enumerate(networks.WIDE_RESNET_STAGES):
        outputs = base * parameters["width"]
        for block in range(networks.blocks_per_stage(parameters["depth"])):
            layers.append(WideResNetBlock(inputs, outputs, 2 if stage and not block else 1))
            inputs = outputs
    layers += [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    module = nn.Sequential(*layers)
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return module
