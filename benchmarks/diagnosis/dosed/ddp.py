"""DDP, for causes of a known size: torchrun --nproc-per-node 2 ddp.py."""

from __future__ import annotations

import itertools
import os

import faults
import torch
import torch.distributed as dist
from parts import CUDA, Clock, asked, network, pictures
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def main() -> None:
    told = asked()
    faults.threads()
    dist.init_process_group("nccl" if CUDA else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    model = DistributedDataParallel(
        faults.plant(network(told.width).to(device)), device_ids=[device] if CUDA else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = faults.data(pictures(), told.batch)
    sampler = faults.sampler(data)
    loader = DataLoader(
        data,
        told.batch,
        sampler=sampler,
        num_workers=told.workers,
        pin_memory=CUDA,
        drop_last=True,
        persistent_workers=faults.stay(told.workers),
        worker_init_fn=faults.start_worker(len(sampler) // told.batch),
    )
    clock = Clock(told.steps)
    between = faults.between(len(loader), told.workers)
    after_step = faults.after_steps(device)
    for epoch in itertools.count():
        between()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            images = faults.moved(images, device)
            labels = labels.to(device, non_blocking=True)
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if clock.step():
                dist.destroy_process_group()
                return
            after_step()


if __name__ == "__main__":
    main()
