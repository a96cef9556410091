"""Lightning's Trainer: bf16-mixed, DDP, the careful loader; nothing logged, nothing saved."""

from __future__ import annotations

from typing import Any

import torch
from common import Training, built, in_parallel_options, opened, turns_of
from job import Job, run
from loaders import careful_loader, queued, workers_of
from torch import Tensor
from turns import Turns

try:
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    import pytorch_lightning as lightning
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment
    from pytorch_lightning.strategies import DDPStrategy


class Module(lightning.LightningModule):
    """The workload's training in Lightning's words."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.model = training.module
        self._training = training

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        images = images.contiguous(memory_format=torch.channels_last)
        return self._training.loss(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._training.optimizer


class TakeTurns(lightning.Callback):
    """Counts every batch."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
        self._turns.step(outputs["loss"])


class Epochs(lightning.Callback):
    """Another order in every epoch: Lightning leaves a sampler of ours alone."""

    def on_train_epoch_start(self, trainer: Any, _module: Any) -> None:
        trainer.train_dataloader.sampler.set_epoch(trainer.current_epoch)


def main(job: Job) -> None:
    workers = job.numbers(workers=workers_of(job))["workers"]
    devices = opened(job)
    loader = careful_loader(job, workers)
    turns = turns_of(job, devices, queued_steps=queued(loader))
    trainer = lightning.Trainer(
        accelerator="gpu" if devices.is_cuda else "cpu",
        devices=job.world_size,
        precision="bf16-mixed",
        max_epochs=-1,
        benchmark=True,
        callbacks=[TakeTurns(turns), Epochs()],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **_distributed(job),
    )
    trainer.fit(Module(built(job, devices.primary)), loader)


def _distributed(job: Job) -> dict[str, Any]:
    """Ranks are started by the driver; torchelastic's environment says that they exist."""
    if job.world_size == 1:
        return {}
    strategy = DDPStrategy(static_graph=True, **in_parallel_options())
    return {"strategy": strategy, "plugins": [TorchElasticEnvironment()]}


if __name__ == "__main__":
    run(main)
