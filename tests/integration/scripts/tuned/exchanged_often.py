"""DistributedDataParallel exchanges the gradients of every accumulated batch: no ``no_sync``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATED = 6
WIDTH = 700


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 10)))
    data = TensorDataset(torch.randn(16_000, 64), torch.randint(0, 10, (16_000,)))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for index, (inputs, labels) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(inputs), labels) / ACCUMULATED
            loss.backward()  # type: ignore[no-untyped-call]
            if (index + 1) % ACCUMULATED == 0:
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
