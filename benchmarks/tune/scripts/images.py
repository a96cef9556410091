"""Images that are augmented when they are read, and a small residual network."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class AugmentedImages(Dataset):
    """Random images of 32 × 32 pixels, cropped, flipped and normalized by numpy."""

    def __init__(self, count: int) -> None:
        generator = np.random.default_rng(0)
        self.images = generator.integers(0, 256, (count, 40, 40, 3), dtype=np.uint8)
        self.labels = generator.integers(0, 10, count)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left = torch.randint(9, (2,)).tolist()
        image = self.images[index, top : top + 32, left : left + 32].astype(np.float32) / 255
        if torch.rand(()) < 0.5:
            image = image[:, ::-1]
        image = (image - image.mean()) / (image.std() + 1e-3)
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))), int(
            self.labels[index]
        )


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, features: Tensor) -> Tensor:
        return torch.relu(features + self.layers(features))


def network(width: int) -> nn.Module:
    """Eleven convolutions; ``width`` channels at first, four times as many at the end."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for stage in (1, 2, 4):
        layers += [Block(stage * width)]
        if stage < 4:
            layers += [nn.Conv2d(stage * width, 2 * stage * width, 2, stride=2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def arguments() -> argparse.Namespace:
    """The arguments of all scripts with these images."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256, help="of one device")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--images", type=int, default=50_000)
    return parser.parse_args()
