"""What a beginner writes: one device, a DataLoader, zero_grad, backward, step; nothing set.

Single precision as PyTorch has it by default: convolutions may use TF32, products may not.
"""

from __future__ import annotations

from common import built, opened, turns_of
from job import Job, run
from loaders import plain_loader


def main(job: Job) -> None:
    workers = job.numbers(workers=4 if job.device == "cuda" else 0)["workers"]
    devices = opened(job)
    device = devices.primary
    training = built(job, device, channels_last=False)
    loader = plain_loader(job, workers)
    turns = turns_of(job, devices, queued_steps=2 * workers)
    while True:
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            training.optimizer.zero_grad()
            loss = training.loss(training.module(images), labels)
            loss.backward()
            training.optimizer.step()
            turns.step(loss.detach())


if __name__ == "__main__":
    run(main)
