"""nn.DataParallel, for causes of a known size: python dataparallel.py."""

from __future__ import annotations

import itertools

import faults
import torch
from parts import CUDA, Clock, asked, network, pictures
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader


def main() -> None:
    told = asked()
    faults.threads()
    devices = max(1, torch.cuda.device_count())
    device = torch.device("cuda", 0) if CUDA else torch.device("cpu")
    model = nn.DataParallel(faults.plant(network(told.width).to(device)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = faults.data(pictures(), told.batch * devices)
    loader = DataLoader(
        data,
        told.batch * devices,
        shuffle=True,
        num_workers=told.workers,
        pin_memory=CUDA,
        drop_last=True,
        persistent_workers=faults.stay(told.workers),
        worker_init_fn=faults.start_worker(len(data) // told.batch // devices),
    )
    clock = Clock(told.steps)
    between = faults.between(len(loader), told.workers)
    after_step = faults.after_steps(device)
    for _ in itertools.count():
        between()
        for images, labels in loader:
            images = faults.moved(images, device)
            labels = labels.to(device, non_blocking=True)
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if clock.step():
                return
            after_step()


if __name__ == "__main__":
    main()
