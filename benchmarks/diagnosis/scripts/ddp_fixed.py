"""A small network on MNIST, turned and shifted on the host, on every device of this machine.

torchrun --nproc-per-node 2 ddp.py
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
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Turned(Dataset):
    """A whole batch at once, every picture turned, shifted and scaled a little."""

    def __init__(self) -> None:
        self.pictures, self.labels = mnist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        pictures = self.pictures[indices].float() / 255
        change = torch.eye(2, 3) + 0.1 * torch.randn(len(indices), 2, 3)
        grid = functional.affine_grid(change, list(pictures.shape), align_corners=False)
        pictures = functional.grid_sample(pictures, grid, align_corners=False)
        return (pictures - 0.13) / 0.31, self.labels[indices]


def network() -> nn.Module:
    """Two convolutions and a classifier."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="of one device")
    asked = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(network().to(device), device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Turned()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, asked.batch, sampler=sampler, collate_fn=lambda batch: batch)
    for epoch in range(asked.epochs):
        sampler.set_epoch(epoch)
        for pictures, labels in loader:
            loss = functional.cross_entropy(model(pictures.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
