"""Inception-v3 in PyTorch: 27,161,264 parameters with the auxiliary head, 23,834,568 without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from nfold.workloads.inception_v3 import (
    AUXILIARY,
    AUXILIARY_GRID_SIDE,
    AUXILIARY_WEIGHT,
    BODY,
    LABEL_SMOOTHING,
    TOP,
    ConvolutionSpec,
    InceptionBranches,
    Layer,
    Pooling3x3,
    Shape,
    output_shape,
)

Outputs = Tensor | tuple[Tensor, Tensor]  # logits [n, classes], and those of the auxiliary head


class ConcatenatedBranches(nn.Module):
    def __init__(self, layer: InceptionBranches, inputs: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(build_layers(branch, inputs) for branch in layer.branches)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([branch(images) for branch in self.branches], dim=1)


class AuxiliaryHead(nn.Module):
    """The head on the 17 × 17 grid: a 5 × 5 mean at stride 3, two convolutions, a dense layer.

    Smaller images have a smaller grid, which is pooled adaptively to 5 × 5.
    """

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        inputs, side, _ = shape
        self.pool = (
            nn.AvgPool2d(5, stride=3) if side >= 17 else nn.AdaptiveAvgPool2d(AUXILIARY_GRID_SIDE)
        )
        self.convolutions = build_layers(AUXILIARY, inputs)
        self.dense = nn.Linear(
            output_shape(AUXILIARY, (inputs, AUXILIARY_GRID_SIDE, AUXILIARY_GRID_SIDE))[0], classes
        )

    def forward(self, grid: Tensor) -> Tensor:
        logits: Tensor = self.dense(self.convolutions(self.pool(grid)).mean((2, 3)))
        return logits


class InceptionV3(nn.Module):
    """The network; in training mode it also returns the logits of the auxiliary head."""

    def __init__(self, size: int, classes: int, *, auxiliary: bool) -> None:
        super().__init__()
        grid = output_shape(BODY, (3, size, size))
        self.body = build_layers(BODY, 3)
        self.auxiliary = AuxiliaryHead(grid, classes) if auxiliary else None
        self.top = build_layers(TOP, grid[0])
        self.dense = nn.Linear(output_shape(TOP, grid)[0], classes)

    def forward(self, images: Tensor) -> Outputs:
        grid = self.body(images)
        logits: Tensor = self.dense(self.top(grid).mean((2, 3)))
        if self.training and self.auxiliary is not None:
            return logits, self.auxiliary(grid)
        return logits


def build_layers(layers: Iterable[Layer], inputs: int) -> nn.Sequential:
    modules: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, InceptionBranches):
            modules.append(ConcatenatedBranches(layer, inputs))
        elif isinstance(layer, Pooling3x3):
            pooling = nn.MaxPool2d(3, 2) if layer.is_max else nn.AvgPool2d(3, 1, padding=1)
            modules.append(pooling)
        else:
            modules += _convolution(layer, inputs)
        inputs = output_shape((layer,), (inputs, 99, 99))[0]
    return nn.Sequential(*modules)


def _convolution(layer: ConvolutionSpec, inputs: int) -> list[nn.Module]:
    kernel = layer.height, layer.width
    padding = (layer.height // 2, layer.width // 2) if layer.padded else 0
    convolution = nn.Conv2d(
        inputs, layer.channels, kernel, stride=layer.stride, padding=padding, bias=False
    )
    norm = nn.BatchNorm2d(layer.channels, eps=1e-3, momentum=3e-4)
    return [convolution, norm, nn.ReLU(inplace=True)]


def model(parameters: Mapping[str, int], classes: int) -> nn.Module:
    """Build the network with the initial weights of Google's training code.

    Truncated normal with standard deviation 0.1; 0.01 and 0.001 in the auxiliary head's last
    layers.
    """
    module = InceptionV3(parameters["size"], classes, auxiliary=bool(parameters["aux"]))
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            _init_weights(layer, 0.1)
    if module.auxiliary is not None:
        _init_weights(module.auxiliary.convolutions[3], 0.01)
        _init_weights(module.auxiliary.dense, 0.001)
    return module


def _init_weights(layer: nn.Module, std: float) -> None:
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    weight = layer.weight.data.normal_(std=std)
    outside = weight.abs() > 2 * std
    while not weight.is_meta and outside.any():  # several times as fast as nn.init.trunc_normal_
        weight[outside] = torch.empty(int(outside.sum())).normal_(std=std)
        outside = weight.abs() > 2 * std
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def loss(outputs: Outputs, labels: Tensor) -> Tensor:
    """Mean cross entropy with smoothed labels, plus AUXILIARY_WEIGHT times the auxiliary head's."""
    if isinstance(outputs, Tensor):
        return _smoothed_cross_entropy(outputs, labels)
    logits, auxiliary = outputs
    return _smoothed_cross_entropy(logits, labels) + AUXILIARY_WEIGHT * _smoothed_cross_entropy(
        auxiliary, labels
    )


def _smoothed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, label_smoothing=LABEL_SMOOTHING)
