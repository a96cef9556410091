"""Train data-parallel on CPU devices; rank 1 computes 10 ms longer in every step."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SPIN_S = 0.010


def main() -> None:
    dist.init_process_group("gloo")
    images, labels = torch.randn(1024, 64), torch.randint(0, 10, (1024,))
    data = TensorDataset(images, labels)
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for x, y in loader:
            if os.environ["RANK"] == "1":
                spin(SPIN_S)
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        torch.save(model.state_dict(), "last.pt")


def spin(seconds: float) -> None:
    """Busy for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


if __name__ == "__main__":
    main()
