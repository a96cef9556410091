"""Train on one device, with a command-line argument and an output file."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    asked = parser.parse_args()
    data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, asked.width), nn.ReLU(), nn.Linear(asked.width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(1000):
        for x, y in loader:
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        with Path("log.txt").open("a") as log:
            log.write(f"{epoch}\n")


if __name__ == "__main__":
    main()
