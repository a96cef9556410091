"""Train with FSDP2 (``fully_shard``) on CPU devices; every layer is sharded."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, LAYERS = 16, 2


def sharded_model() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = sharded_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.randn(64, WIDTH), torch.randint(0, WIDTH, (64,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=4, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for features, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


if __name__ == "__main__":
    main()
