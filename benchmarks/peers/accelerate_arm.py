"""Hugging Face Accelerate: bf16, DDP, the careful loader, of which it takes each rank's part."""

from __future__ import annotations

import itertools
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from common import built, opened, turns_of
from job import Job, run
from loaders import careful_loader, queued, workers_of


def main(job: Job) -> None:
    workers = job.numbers(workers=workers_of(job))["workers"]
    devices = opened(job)
    torch.backends.cudnn.benchmark = True
    accelerator = prepared(job)
    training = built(job, devices.primary)
    loader = careful_loader(job, workers, sharded=False)
    turns = turns_of(job, devices, queued_steps=queued(loader))
    model, optimizer, loader = accelerator.prepare(training.module, training.optimizer, loader)
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        for images, labels in loader:
            images = images.contiguous(memory_format=torch.channels_last)
            with accelerator.autocast():
                loss = training.loss(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            turns.step(loss.detach())


def prepared(job: Job) -> Accelerator:
    """One process is told of no ranks: it would wrap the model in DDP for itself alone."""
    if job.world_size == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    return Accelerator(
        mixed_precision="bf16",
        cpu=job.device == "cpu",
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
            )
        ],
    )


if __name__ == "__main__":
    run(main)
