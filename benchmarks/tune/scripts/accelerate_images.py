"""An image classifier with Accelerate: torchrun --nproc-per-node 2 accelerate_images.py."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from images import AugmentedImages, arguments, network
from torch.nn import functional
from torch.utils.data import DataLoader


def main() -> None:
    asked = arguments()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = network(asked.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(AugmentedImages(asked.images), batch_size=asked.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(asked.epochs):
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
