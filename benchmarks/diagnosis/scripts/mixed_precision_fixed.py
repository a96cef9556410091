"""A residual network on CIFAR-10 in mixed precision: python mixed_precision.py."""

from __future__ import annotations

import argparse

import torch
from pictures import cifar10
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """Two convolutions beside a way around them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.around = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        found = functional.relu(self.norms[0](self.first(pictures)))
        return functional.relu(self.norms[1](self.second(found)) + self.around(pictures))


def network(width: int) -> nn.Module:
    """Three stages of blocks, each of half the size and twice the width."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for stage in range(3):
        inputs, outputs = width * max(1, 2 ** (stage - 1)), width * 2**stage
        layers += [Block(inputs, outputs), Block(outputs, outputs), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = network(asked.width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pictures, labels = cifar10()
    data = TensorDataset(pictures, labels)
    workers = 4 if device.type == "cuda" else 0
    loader = DataLoader(data, asked.batch, shuffle=True, num_workers=workers, pin_memory=True)
    for epoch in range(asked.epochs):
        for pictures, labels in loader:
            pictures = pictures.to(device, non_blocking=True).float() / 255 - 0.5
            pictures = pictures.contiguous(memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = functional.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
