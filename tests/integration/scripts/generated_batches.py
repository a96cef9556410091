"""Train data-parallel on batches of a generator, without a DataLoader."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SLOW_S = 0.05  # per batch


def batches(split: str) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        time.sleep(SLOW_S if split == "train" else 0.0)
        yield torch.randn(8, 8), torch.randint(0, 4, (8,))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for samples, labels in batches("train"):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(samples), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


if __name__ == "__main__":
    main()
