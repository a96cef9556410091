"""Accelerate, for causes of a known size: torchrun --nproc-per-node 2 with_accelerate.py."""

from __future__ import annotations

import itertools

import faults
import torch
from accelerate import Accelerator
from parts import CUDA, Clock, asked, network, pictures
from torch.nn import functional
from torch.utils.data import DataLoader


def main() -> None:
    told = asked()
    faults.threads()
    accelerator = Accelerator(cpu=not CUDA)
    model = faults.plant(network(told.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = faults.data(pictures(), told.batch)
    loader = DataLoader(
        data,
        told.batch,
        shuffle=True,
        num_workers=told.workers,
        pin_memory=CUDA,
        drop_last=True,
        persistent_workers=faults.stay(told.workers),
        worker_init_fn=faults.start_worker(len(data) // told.batch // accelerator.num_processes),
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    clock = Clock(told.steps)
    between = faults.between(len(loader), told.workers)
    after_step = faults.after_steps(accelerator.device)
    for _ in itertools.count():
        between()
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            if clock.step():
                return
            after_step()


if __name__ == "__main__":
    main()
