"""A small network on CIFAR-10, every picture cropped, mirrored and coloured: python single.py."""

from __future__ import annotations

import argparse

import torch
from pictures import cifar10
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Changed(Dataset):
    """Every picture cropped, mirrored and of another brightness, drawn anew each time."""

    def __init__(self) -> None:
        self.pictures, self.labels = cifar10()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        picture = functional.pad(self.pictures[index].float() / 255, (4, 4, 4, 4))
        top, left = torch.randint(9, (2,)).tolist()
        picture = picture[:, top : top + 32, left : left + 32]
        if torch.rand(()) < 0.5:
            picture = picture.flip(2)
        return (picture * (0.8 + 0.4 * torch.rand(())) - 0.47) / 0.25, self.labels[index]


def network() -> nn.Module:
    """Three convolutions and a classifier."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Changed(), asked.batch, shuffle=True, num_workers=8)
    for epoch in range(asked.epochs):
        for pictures, labels in loader:
            loss = functional.cross_entropy(model(pictures.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
