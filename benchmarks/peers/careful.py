"""A careful person's DDP: bf16 autocast, channels_last, fused SGD, cuDNN's search, pinned memory.

Samples are transformed one by one in a loader's persistent workers, ``ahead`` batches each.
"""

from __future__ import annotations

import itertools

import torch
from common import bf16, built, in_parallel, joined, opened, turns_of
from job import Job, run
from loaders import PREFETCH, careful_loader, queued, workers_of

from nfold.engines.torch.devices import Devices


def main(job: Job) -> None:
    devices = opened(job)
    torch.backends.cudnn.benchmark = True
    with joined(job, devices):
        train(job, devices)


def train(job: Job, devices: Devices) -> None:
    device = devices.primary
    chosen = job.numbers(workers=workers_of(job), ahead=PREFETCH)
    training = built(job, device)
    model = in_parallel(training.module, job, device, static_graph=True)
    loader = careful_loader(job, chosen["workers"], ahead=chosen["ahead"])
    turns = turns_of(job, devices, queued_steps=queued(loader))
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            with bf16(device):
                loss = training.loss(model(images), labels)
            training.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            training.optimizer.step()
            turns.step(loss.detach())


if __name__ == "__main__":
    run(main)
