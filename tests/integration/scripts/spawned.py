"""Spawn two ranks; the second needs 10 ms more in every step."""

from __future__ import annotations

import os
import time

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORLD_SIZE = 2
SPIN_S = 0.010


def main(rank: int, world_size: int, epochs: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 4, (4096,)))
    sampler: DistributedSampler[object] = DistributedSampler(
        data, num_replicas=world_size, rank=rank
    )
    loader = DataLoader(data, 32, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            if rank == 1:
                end = time.perf_counter() + SPIN_S
                while time.perf_counter() < end:
                    pass
            optimizer.step()
    destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (WORLD_SIZE, 1000), WORLD_SIZE)  # type: ignore[attr-defined, no-untyped-call]
