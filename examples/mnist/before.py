"""Handwritten digits on one device, as people write it."""

import argparse

import torch
from data import mnist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=9000)
options = parser.parse_args()

torch.manual_seed(0)
train, test = mnist(options.samples)
model = nn.Sequential(
    nn.Conv2d(1, 32, 5, padding=2),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 5, padding=2),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64 * 7 * 7, 1024),
    nn.ReLU(),
    nn.Dropout(0.4),
    nn.Linear(1024, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
train_loader = DataLoader(train, batch_size=100, shuffle=True)
test_loader = DataLoader(test, batch_size=500)

for epoch in range(options.epochs):
    model.train()
    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test_loader:
            right += (model(images).argmax(1) == labels).sum().item()
    print(f"epoch {epoch + 1} accuracy {right / len(test):.4f}")
