"""A training on a GPU with little memory left, in which one tensor is larger in every step."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks" / "diagnosis" / "dosed"))

import torch
from ballast import Ballast
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE = torch.device("cuda")


def main() -> None:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(4096, 1024), torch.randint(0, 10, (4096,)))
    grow = Ballast(float(sys.argv[1]), DEVICE)
    while True:
        for samples, labels in DataLoader(data, batch_size=256):
            grow()
            loss = nn.functional.cross_entropy(model(samples.to(DEVICE)), labels.to(DEVICE))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
