"""A multilayer perceptron on MNIST, a process a device.

torchrun --nproc-per-node 2 dataparallel_fixed.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from pictures import mnist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128, help="of all devices together")
    asked = parser.parse_args()
    count = torch.cuda.device_count()
    dist.init_process_group("nccl" if count else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if count else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    model = DistributedDataParallel(model.to(device), device_ids=[device] if count else None)
    optimizer = torch.optim.RMSprop(model.parameters())
    pictures, labels = mnist()
    data = TensorDataset(pictures.float() / 255, labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, asked.batch // dist.get_world_size(), sampler=sampler)
    for epoch in range(asked.epochs):
        sampler.set_epoch(epoch)
        for batch, classes in loader:
            loss = functional.cross_entropy(model(batch.to(device)), classes.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
