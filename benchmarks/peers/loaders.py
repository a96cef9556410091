"""Input as most people write it: a DataLoader whose workers transform one sample at a time.

With torchvision its transforms on PIL images, as its CIFAR10 and MNIST classes give them out;
without it the same in NumPy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from job import Job
from photographs import Photographs
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from nfold.core.child_process import die_with_parent
from nfold.data.arrays import DataSetArrays
from nfold.telemetry.machine_inspection import usable_cores

try:
    from PIL import Image
    from torchvision import transforms
except ImportError:
    transforms = None

PREFETCH = 4
"""Batches that each worker prepares ahead."""
MOST_WORKERS = 15
"""As many as a host of 16 cores has for one GPU."""
Sample = tuple[Tensor, int]
Operations = tuple[tuple[str, int], ...]
Transform = Callable[[npt.NDArray[np.uint8]], Tensor]
"""An image [h, w, c] to the model's input [c, h, w]."""


class Samples(Dataset[Sample]):
    """Single samples, transformed."""

    def __init__(self, arrays: DataSetArrays, operations: Operations) -> None:
        unknown = {name for name, _ in operations} - {"crop", "flip"}
        if unknown:
            raise ValueError(f"the peers have no {', '.join(sorted(unknown))}")
        made = torchvision_transform if transforms else Handmade
        self._transform: Transform = made(arrays, dict(operations))
        self._images = arrays.train_images
        self._labels = arrays.train_labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        return self._transform(self._images[index]), int(self._labels[index])


def torchvision_transform(arrays: DataSetArrays, operations: dict[str, int]) -> Transform:
    """Random crop and flip, float, normalised, by torchvision."""
    steps: list[Any] = [_picture]
    if "crop" in operations:
        steps.append(transforms.RandomCrop(arrays.train_images.shape[1], operations["crop"]))
    if "flip" in operations:
        steps.append(transforms.RandomHorizontalFlip())
    mean, std = [[value / 255 for value in values] for values in (arrays.mean, arrays.std)]
    steps += [transforms.ToTensor(), transforms.Normalize(mean, std)]
    composed: Transform = transforms.Compose(steps)
    return composed


def _picture(image: npt.NDArray[np.uint8]) -> Any:
    return Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image)


class Handmade:
    """The same in NumPy."""

    def __init__(self, arrays: DataSetArrays, operations: dict[str, int]) -> None:
        self._padding = operations.get("crop", 0)
        self._flips = "flip" in operations
        self._side = arrays.train_images.shape[1]
        self._mean = np.float32(arrays.mean)
        self._inverse_std = 1 / np.float32(arrays.std)

    def __call__(self, image: npt.NDArray[np.uint8]) -> Tensor:
        by = self._padding
        if by:
            image = np.pad(image, ((by, by), (by, by), (0, 0)))
            down, right = random.randint(0, 2 * by), random.randint(0, 2 * by)
            image = image[down : down + self._side, right : right + self._side]
        if self._flips and random.random() < 0.5:
            image = image[:, ::-1]
        normal = (image - self._mean) * self._inverse_std
        return torch.from_numpy(np.ascontiguousarray(normal.transpose(2, 0, 1)))


def samples_of(job: Job) -> Dataset[Sample]:
    """The workload's samples, one by one."""
    files = job.photographs()
    if files is None:
        return Samples(job.arrays(), job.info.augmentation)
    return Photographs(files, job.parameters["size"], job.parameters["repeat"])


def plain_loader(job: Job, workers: int) -> DataLoader[Sample]:
    """What a tutorial shows."""
    samples = samples_of(job)
    return DataLoader(
        samples, batch_size=job.share, shuffle=True, num_workers=workers, drop_last=True
    )


def careful_loader(
    job: Job, workers: int, *, sharded: bool = True, ahead: int = PREFETCH
) -> DataLoader[Sample]:
    """Pinned memory, persistent workers, batches ahead; this rank's part unless not ``sharded``."""
    samples = samples_of(job)
    ranks, rank = (job.world_size, job.rank) if sharded else (1, 0)
    return DataLoader(
        samples,
        batch_size=job.share,
        sampler=DistributedSampler(samples, ranks, rank, drop_last=True),
        drop_last=True,
        num_workers=workers,
        pin_memory=job.device == "cuda",
        persistent_workers=workers > 0,
        prefetch_factor=ahead if workers else None,
        worker_init_fn=_start_worker,
    )


def _start_worker(_: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)


def workers_of(job: Job) -> int:
    """For every core of a GPU's share but one, at most MOST_WORKERS; none on a CPU device."""
    share = usable_cores() // job.world_size - 1
    return max(1, min(share, MOST_WORKERS)) if job.device == "cuda" else 0


def queued(loader: DataLoader[Sample]) -> int:
    """Batches that may wait in a loader's queues."""
    return loader.num_workers * (loader.prefetch_factor or 0)
