"""Train a small network on one device, with images that one process prepares one by one."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAMPLES = 4096


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Grey images as bytes, normalised when they are read, as in PyTorch's MNIST example."""

    def __init__(self) -> None:
        self.bytes = torch.randint(0, 256, (SAMPLES, 28, 28), dtype=torch.uint8)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.bytes[index].float().div(255)
        for _ in range(6):
            image = image.sub(0.1307).div(0.3081)
        return image.unsqueeze(0), index % 10


def main() -> None:
    loader = DataLoader(Images(), batch_size=64, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 13 * 13, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    while True:
        for images, labels in loader:
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()


if __name__ == "__main__":
    main()
