"""A small ResNet for images [n, 3, 32, 32] (K. He and others, CVPR 2016)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.first_norm(self.first(images)))
        hidden = self.second_norm(self.second(hidden))
        return functional.relu(hidden + self.shortcut(images))


class ResNet(nn.Sequential):
    def __init__(self, classes: int, width: int = 16, blocks: int = 2) -> None:
        layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        inputs = width
        for stage in range(3):
            for block in range(blocks):
                outputs = width * 2**stage
                layers.append(Block(inputs, outputs, 2 if stage and not block else 1))
                inputs = outputs
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
        super().__init__(*layers)
