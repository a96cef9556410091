"""Train data-parallel on batches of a function, without a DataLoader."""

from __future__ import annotations

import itertools
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SLOW_S = 0.05  # per batch


def get_batch(split: str) -> tuple[Tensor, Tensor]:
    time.sleep(SLOW_S if split == "train" else 0.0)
    return torch.randn(8, 8, dtype=torch.float64), torch.randint(0, 4, (8,))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples, labels = get_batch("train")
    for _ in itertools.count():
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(samples.to(torch.float32)), labels)
            samples, labels = get_batch("train")
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
