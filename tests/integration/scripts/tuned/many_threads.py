"""Computes with more threads than a rank has cores."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(8)
    data = TensorDataset(torch.randn(2048, 256), torch.randint(0, 4, (2048,)))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=128, sampler=sampler)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(256, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(10_000):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


if __name__ == "__main__":
    main()
