"""Ten layers on CIFAR-10 under DDP as a careful engineer writes it, 512 pictures a device.

torchrun --nproc-per-node 4 cifar_ddp.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import transformed
from pictures import cifar10
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


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
    pictures, labels = (one.to(device) for one in cifar10())
    pictures = transformed.framed(pictures)
    scale, shift = transformed.normalising(device, torch.bfloat16)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = len(labels) // (ranks * asked.batch) * asked.batch
    order = torch.Generator(device).manual_seed(0)
    for epoch in range(asked.epochs):
        shuffled = torch.randperm(len(labels), generator=order, device=device)
        where = transformed.windows(share, device)
        for which, rows, columns in zip(
            shuffled[rank * share : (rank + 1) * share].split(asked.batch),
            *(one.split(asked.batch) for one in where),
            strict=True,
        ):
            batch = pictures[which[:, None, None], rows[:, :, None], columns[:, None, :]]
            batch = torch.addcmul(shift, batch, scale).permute(0, 3, 1, 2)
            with torch.autocast(device.type, torch.bfloat16):
                loss = functional.cross_entropy(model(batch), labels[which])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
