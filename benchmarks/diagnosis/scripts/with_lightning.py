"""A small network on mixed pictures of MNIST in Lightning, on every device of this machine.

torchrun --nproc-per-node 2 with_lightning.py
"""

from __future__ import annotations

import argparse
import os

import lightning.pytorch as lightning
import torch
from pictures import mnist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Mixed(Dataset):
    """Every picture with another one of the set, drawn anew each time, laid over it."""

    def __init__(self) -> None:
        self.pictures, self.labels = mnist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        other = int(torch.randint(len(self), ()))
        mixed = self.pictures[index].float() + 0.3 * self.pictures[other].float()
        return mixed / 255, self.labels[index]


class Classifier(lightning.LightningModule):
    """Two convolutions and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
        )  # fmt: skip

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        pictures, labels = batch
        return functional.cross_entropy(self.network(pictures), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="of one device")
    asked = parser.parse_args()
    lightning.seed_everything(0)
    loader = DataLoader(Mixed(), asked.batch, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",
        max_epochs=asked.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()
