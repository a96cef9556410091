"""The image classifier of plain_images.py by hand on N devices, with DistributedDataParallel."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from images import AugmentedImages, arguments, network
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    asked = arguments()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    model = network(asked.width).to(device)
    model = DistributedDataParallel(model, [rank] if cuda else None, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = AugmentedImages(asked.images)
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data,
        batch_size=asked.batch // dist.get_world_size(),
        sampler=sampler,
        num_workers=8 if cuda else 1,
        persistent_workers=True,
        pin_memory=cuda,
    )
    for epoch in range(asked.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
