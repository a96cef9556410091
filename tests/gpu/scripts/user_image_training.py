"""A training on images as people write it, on one GPU, under DataParallel, or under DDP."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Train for ever."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--dp", action="store_true")
    parser.add_argument("--slow", action="store_true", help="host and device, 20 and 10 ms a step")
    requested = parser.parse_args()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    data = TensorDataset(torch.randn(1024, 3, 32, 32), torch.randint(0, 10, (1024,)))
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3),
        nn.Flatten(),
        nn.Linear(32 * 28 * 28, 10),
    )
    model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sampler: Any = None
    if requested.ddp:
        dist.init_process_group("nccl")
        sampler = DistributedSampler(data)
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device])
    elif requested.dp:
        model = nn.DataParallel(model)
    loader = DataLoader(
        data, batch_size=64, sampler=sampler, num_workers=1, pin_memory=True, drop_last=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        for samples, labels in loader:
            images = samples.to(device, non_blocking=True, memory_format=torch.channels_last)
            wanted = labels.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images), wanted)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if requested.slow:
                torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            loss.item()
            time.sleep(0.02 if requested.slow else 0)


if __name__ == "__main__":
    main()
