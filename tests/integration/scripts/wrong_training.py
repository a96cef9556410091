"""Two ranks whose training is wrong, or looks so, in the way that the first argument names."""

# mypy: ignore-errors
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

kind = sys.argv[1]
if kind == "bound":
    first_core = min(os.sched_getaffinity(os.getppid()))
    os.sched_setaffinity(0, {first_core})
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.backbone(x)), y)


class EveryWorkerReadsAll(IterableDataset):
    def __iter__(self):
        random = torch.Generator().manual_seed(rank)
        for _ in range(1000):
            yield torch.rand(16, generator=random), int(torch.randint(10, (), generator=random))


class Augmented(Dataset):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int):
        return x[index] + 0.1 * torch.rand(16), y[index]


torch.manual_seed(rank if kind in ("initial", "own-data") else 0)
x, y = torch.rand(1024, 16), torch.randint(10, (1024,))
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
if kind == "repeated":
    loader = DataLoader(EveryWorkerReadsAll(), 8, num_workers=2)
elif kind == "own-data":
    loader = DataLoader(TensorDataset(x[:512], y[:512]), 8, shuffle=True)
elif kind == "views":
    shared = torch.Generator().manual_seed(1)
    loader = DataLoader(Augmented(), 8, shuffle=True, generator=shared)
    torch.manual_seed(rank)
elif kind == "one-order":
    sampler = DistributedSampler(TensorDataset(x[:256], y[:256]))
    loader = DataLoader(TensorDataset(x[:256], y[:256]), 8, sampler=sampler)


def random_batches():
    for _ in range(1000):
        yield torch.rand(8, 16), torch.randint(10, (8,))


if kind == "same-batches":
    loader = random_batches()
model = Classifier()
if kind == "thawed":
    model.backbone.requires_grad_(False)
wrapped = model if kind == "initial" else DistributedDataParallel(model)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
step = 0
for epoch in range(1000):
    if kind != "one-order":
        sampler.set_epoch(epoch)
    for inputs, targets in loader:
        if kind == "thawed" and step == 12:
            model.backbone.requires_grad_(True)
            optimizer.add_param_group({"params": model.backbone.parameters()})
        if kind == "past-wrapper":
            loss = wrapped.module.loss(inputs, targets)
        else:
            loss = nn.functional.cross_entropy(wrapped(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if kind == "initial":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        optimizer.step()
        step += 1
