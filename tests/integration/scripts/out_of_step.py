"""Two ranks that get out of step in a way that the first argument names."""

# mypy: ignore-errors
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

kind = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.rand(2048, 16), torch.randint(0, 4, (2048,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
net = nn.Sequential(nn.Linear(16, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 0
for epoch in range(1000):
    sampler.set_epoch(epoch)
    for x, y in loader:
        steps += 1
        if kind == "skips" and rank == 1 and steps == 33:
            continue
        if kind == "leaves" and rank == 1 and steps == 60:
            break
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if kind == "evaluates" and rank == 0 and steps == 60:
            model.eval()
            model(x)
            model.train()
            model(x)
            dist.barrier()
    if kind == "leaves" and rank == 1:
        break
    if kind == "skips":
        dist.all_reduce(torch.zeros(1))
