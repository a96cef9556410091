"""A wide network on MNIST with Accelerate: gradients of four batches are summed before a step.

torchrun --nproc-per-node 2 with_accelerate.py
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from pictures import mnist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

PARTS = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="of one device, in each part")
    parser.add_argument("--width", type=int, default=1024)
    asked = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    pictures, labels = mnist()
    data = TensorDataset(pictures.flatten(1).float() / 255, labels)
    model = nn.Sequential(
        nn.Linear(28 * 28, asked.width), nn.ReLU(),
        nn.Linear(asked.width, asked.width), nn.ReLU(),
        nn.Linear(asked.width, asked.width), nn.ReLU(),
        nn.Linear(asked.width, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, asked.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(asked.epochs):
        for number, (batch, classes) in enumerate(loader, 1):
            with nullcontext() if number % PARTS == 0 else accelerator.no_sync(model):
                loss = functional.cross_entropy(model(batch), classes) / PARTS
                accelerator.backward(loss)
            if number % PARTS == 0:
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {PARTS * loss.item():.3f}")


if __name__ == "__main__":
    main()
