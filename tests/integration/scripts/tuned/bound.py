"""Binds every rank to the same core, as a library may do, and prints the cores."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MARK, REPORTED_STEP = "facts ", 12


def main() -> None:
    """Train endlessly."""
    os.sched_setaffinity(0, {0})
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(2048, 16), torch.randint(0, 4, (2048,)))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps += 1
            if steps == REPORTED_STEP:
                facts = {"cores": sorted(os.sched_getaffinity(0))}
                sys.stdout.write(f"{MARK}{json.dumps(facts)}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
