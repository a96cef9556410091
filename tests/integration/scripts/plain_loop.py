"""Trains a small model on one device, on samples that take long to read."""

import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class SlowSamples(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.008)
        return torch.full((16,), index / 1024), index % 4


def main() -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    data = SlowSamples()
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
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
