"""Train with DistributedDataParallel, without nfold."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LONG_S = 6.0  # of a validation
SHORT_S = 0.1  # of the work of rank 0 after some steps, or after every pass
SLOW_RANK_S = 0.05  # of the work of rank 1 before every step
OFTEN = 5  # steps between the work of rank 0


def log() -> None:
    """Simulate the work of rank 0 after some steps."""
    time.sleep(SHORT_S)


def save() -> None:
    """Simulate the work of rank 0 after every pass."""
    time.sleep(SHORT_S)


def shifted(model: nn.Module, size: float) -> list[torch.Tensor]:
    """Add noise to every parameter, different on each rank; return the noise."""
    draws = torch.Generator().manual_seed(dist.get_rank())
    added = [size * torch.randn(one.shape, generator=draws) for one in model.parameters()]
    for parameter, mine in zip(model.parameters(), added, strict=True):
        parameter.data += mine
    return added


def main(wish: str) -> None:
    """Train endlessly, with the behaviour that ``wish`` names."""
    sys.stdout.write(f"terminal {os.popen('stty size').read()}\n")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, 8), torch.randint(0, 4, (128,)))
    sampler: Any = None if wish == "same" else DistributedSampler(data)
    loader = DataLoader(data, batch_size=None if wish == "unbatched" else 8, sampler=sampler)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    if wish != "forgets":
        model = DistributedDataParallel(model)
    if wish == "beside":
        torch.manual_seed(0)
        model = nn.Sequential(model, nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    try:
        while not (wish == "short" and steps > 6):
            for samples, labels in loader:
                if wish.startswith("slow") and dist.get_rank() == 1:
                    time.sleep(SLOW_RANK_S if wish == "slow" else 4 * SLOW_RANK_S)
                added = shifted(model, 0.01) if wish == "perturbs" else []
                loss = nn.functional.cross_entropy(model(samples), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                if wish.startswith("fails") and steps == int(wish[5:] or 3):
                    raise KeyError("accuracy")
                for parameter, mine in zip(model.parameters(), added, strict=bool(added)):
                    parameter.data -= mine
                if wish == "noisy":
                    shifted(model, 0.001)
                optimizer.step()
                dist.all_reduce(loss.detach())
                steps += 1
                if wish == "logs" and dist.get_rank() == 0 and steps % OFTEN == 0:
                    log()
                if wish == "short" and steps > 6:
                    break
            if wish == "saves" and dist.get_rank() == 0:
                save()
            if wish == "validates" and dist.get_rank() == 0:
                time.sleep(LONG_S)
    finally:
        sys.stdout.write(f"finally {steps}\n")
        if wish == "unbatched":
            raise RuntimeError("nothing to tidy up")


if __name__ == "__main__":
    main(sys.argv[1])
