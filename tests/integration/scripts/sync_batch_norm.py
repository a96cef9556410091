"""Train with SyncBatchNorm, which needs GPUs; rank 1 waits before every step."""

from __future__ import annotations

import itertools
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHANNELS, LAYERS = 8, 2
WAIT_S = 0.03


def main() -> None:
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS))
        for _ in range(LAYERS)
    ]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    model = convert(model).to(device)  # type: ignore[no-untyped-call]
    wrapped = DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    images = TensorDataset(torch.randn(128, CHANNELS, 8, 8), torch.randint(0, CHANNELS, (128,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(images)
    loader = DataLoader(images, batch_size=8, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for pixels, labels in loader:
            time.sleep(WAIT_S * rank)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wrapped(pixels.to(device)), labels.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


if __name__ == "__main__":
    main()
