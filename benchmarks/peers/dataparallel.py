"""nn.DataParallel in single precision without TF32: one process for all devices.

cuDNN does not search: under nn.DataParallel it would in every step
(docs/decisions/kernels-and-layout.md).
"""

from __future__ import annotations

import itertools

import torch
from common import built, opened, turns_of
from job import Job, run
from loaders import careful_loader, queued, workers_of
from torch.nn.parallel import DataParallel


def main(job: Job) -> None:
    workers = job.numbers(workers=workers_of(job))["workers"]
    devices = opened(job)
    device = devices.primary
    torch.backends.cudnn.allow_tf32 = False
    training = built(job, device, channels_last=False)
    model = DataParallel(training.module, device_ids=list(devices.all) if devices.is_cuda else None)
    loader = careful_loader(job, workers)
    turns = turns_of(job, devices, queued_steps=queued(loader))
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            training.optimizer.zero_grad()
            loss = training.loss(model(images), labels)
            loss.backward()
            training.optimizer.step()
            turns.step(loss.detach())


if __name__ == "__main__":
    run(main)
