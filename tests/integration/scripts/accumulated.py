"""Train with gradient accumulation that the ranks divide, as nanoGPT does."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

accumulation_steps = 1
names = {name for name in globals() if not name.startswith("_")}
for argument in sys.argv[1:]:
    name, _, value = argument.removeprefix("--").partition("=")
    assert name in names
    globals()[name] = int(value)

model: nn.Module = nn.Linear(64, 64)
if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    assert accumulation_steps % world_size == 0
    accumulation_steps //= world_size
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    for _step in range(accumulation_steps):
        torch.autograd.backward(model(torch.randn(32, 64)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
