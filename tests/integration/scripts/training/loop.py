"""Train from a module of a package, with relative imports and an output file."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from .data import Slow


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=32)
    asked = parser.parse_args()
    model = nn.Sequential(nn.Linear(16, asked.width), nn.ReLU(), nn.Linear(asked.width, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(100):
        for samples, labels in DataLoader(Slow(), batch_size=10):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(samples), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        Path(__file__).with_name("epoch.txt").write_text(str(epoch))


if __name__ == "__main__":
    main()
