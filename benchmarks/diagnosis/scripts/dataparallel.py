"""A multilayer perceptron on MNIST, one process for all devices: python dataparallel.py."""

from __future__ import annotations

import argparse

import torch
from pictures import mnist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128, help="of all devices together")
    asked = parser.parse_args()
    count = torch.cuda.device_count()
    device = torch.device("cuda", 0) if count else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    model = nn.DataParallel(model.to(device))
    optimizer = torch.optim.RMSprop(model.parameters())
    pictures, labels = mnist()
    data = TensorDataset(pictures.float() / 255, labels)
    loader = DataLoader(data, asked.batch, shuffle=True)
    for epoch in range(asked.epochs):
        for batch, classes in loader:
            loss = functional.cross_entropy(model(batch.to(device)), classes.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
