"""Lightning, for causes of a known size: torchrun --nproc-per-node 2 with_lightning.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import faults
import lightning.pytorch as lightning
import rota
import torch
from parts import CUDA, WARMUP, Clock, asked, network, pictures
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    """The network under Lightning."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = faults.plant(network(width))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Timed(lightning.Callback):
    """Counts every batch; before every epoch comes what lies ``between``."""

    after_step: Callable[[], None]

    def __init__(self, steps: int, between: Callable[[], None]) -> None:
        self._clock = Clock(steps)
        self._between = between

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.after_step = faults.after_steps(trainer.strategy.root_device)

    def on_train_epoch_start(self, *_: Any) -> None:
        self._between()

    def on_train_batch_end(self, *_: Any) -> None:
        self._clock.step()
        self.after_step()


def main() -> None:
    told = asked()
    faults.threads()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    data = faults.data(pictures(), told.batch)
    batches = len(data) // told.batch // ranks
    loader = DataLoader(
        data,
        told.batch,
        shuffle=True,
        num_workers=told.workers,
        pin_memory=CUDA,
        drop_last=True,
        persistent_workers=faults.stay(told.workers),
        worker_init_fn=faults.start_worker(batches),
    )
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=ranks,
        strategy="ddp",
        max_epochs=-1,
        max_steps=(WARMUP + told.steps) * len(rota.turns()),
        callbacks=[Timed(told.steps, faults.between(batches, told.workers))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(told.width), loader)


if __name__ == "__main__":
    main()
