"""Trains a small model that takes long for each sample, on one device."""

import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((16,), index / 1024), index % 4


class SlowClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.008 * len(x))  # as long on any processor, and no remedy shortens it
        scores: torch.Tensor = self.layers(x)
        return scores


def main() -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    data = Samples()
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = SlowClassifier().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        torch.save(model.state_dict(), Path("model.pt"))


if __name__ == "__main__":
    main()
