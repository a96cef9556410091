"""Ten layers on CIFAR-10 under DDP as a careful engineer writes it, 512 pictures a device.

torchrun --nproc-per-node 4 cifar_ddp.py --workers 14
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import transformed
from pictures import cifar10
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Augmented(Dataset):
    """Every picture cropped, mirrored and normalised by itself."""

    def __init__(self) -> None:
        pictures, labels = cifar10()
        self.pictures = np.ascontiguousarray(pictures.permute(0, 2, 3, 1).numpy())
        self.labels = labels.numpy()
        self.change = transformed.training()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.change(self.pictures[index]), int(self.labels[index])


def network() -> nn.Module:
    """Nine convolutions in three stages and a classifier."""
    layers: list[nn.Module] = []
    inputs = 3
    for stage, channels in enumerate((64, 128, 256)):
        layers += [nn.AvgPool2d(2)] if stage else []
        for _ in range(3):
            layers.append(nn.Conv2d(inputs, channels, 3, padding=1, bias=False))
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            inputs = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--batch", type=int, default=512, help="of one device")
    parser.add_argument("--workers", type=int, default=14, help="of one device")
    asked = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    model = network().to(device, memory_format=torch.channels_last)
    model = DistributedDataParallel(
        model,
        device_ids=[device] if cuda else None,
        gradient_as_bucket_view=True,
        static_graph=True,
        broadcast_buffers=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=5e-4, fused=True)
    data = Augmented()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(
        data,
        asked.batch,
        sampler=sampler,
        num_workers=asked.workers,
        pin_memory=cuda,
        persistent_workers=asked.workers > 0,
        prefetch_factor=4 if asked.workers else None,
        drop_last=True,
    )
    for epoch in range(asked.epochs):
        sampler.set_epoch(epoch)
        for pictures, labels in loader:
            pictures = pictures.to(device, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = functional.cross_entropy(model(pictures), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
