"""An image classifier with Lightning: torchrun --nproc-per-node 2 lightning_images.py."""

from __future__ import annotations

import os

import lightning.pytorch as pl
import torch
from images import AugmentedImages, arguments, network
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader


class Classifier(pl.LightningModule):
    """Trains the network by stochastic gradient descent."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = network(width)

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.model(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    asked = arguments()
    pl.seed_everything(0)
    loader = DataLoader(AugmentedImages(asked.images), batch_size=asked.batch, shuffle=True)
    trainer = pl.Trainer(
        max_epochs=asked.epochs,
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(asked.width), loader)


if __name__ == "__main__":
    main()
