"""An image classifier on one device: python plain_images.py."""

from __future__ import annotations

import torch
from images import AugmentedImages, arguments, network
from torch.nn import functional
from torch.utils.data import DataLoader


def main() -> None:
    asked = arguments()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = network(asked.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(AugmentedImages(asked.images), batch_size=asked.batch, shuffle=True)
    for epoch in range(asked.epochs):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
