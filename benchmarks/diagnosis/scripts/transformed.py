"""Pictures of CIFAR-10 cropped, mirrored and normalised, by torchvision where it can be had."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

try:
    from PIL import Image
    from torchvision import transforms
except (ImportError, RuntimeError):  # torchvision needs the build of torch that it was made for
    transforms = None

MEAN = np.float32([0.491, 0.482, 0.447])
STD = np.float32([0.247, 0.244, 0.262])


def training() -> Callable[[np.ndarray], torch.Tensor]:
    """From a picture of bytes (32, 32, 3) to what the model takes (3, 32, 32)."""
    if transforms is None:
        return by_hand
    return transforms.Compose(
        [
            Image.fromarray,
            transforms.RandomCrop(32, 4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN.tolist(), STD.tolist()),
        ]
    )


def by_hand(picture: np.ndarray) -> torch.Tensor:
    """The same in NumPy."""
    picture = np.pad(picture, ((4, 4), (4, 4), (0, 0)))
    top, left, mirrored = torch.randint(0, 9, (3,)).tolist()
    picture = picture[top : top + 32, left : left + 32]
    if mirrored % 2:
        picture = picture[:, ::-1]
    normal = (picture / np.float32(255) - MEAN) / STD
    return torch.from_numpy(np.ascontiguousarray(normal.transpose(2, 0, 1)))


def cropped(pictures: torch.Tensor) -> torch.Tensor:
    """Every picture (n, 3, 32, 32) cropped and mirrored by itself, where it is."""
    count, where = len(pictures), pictures.device
    padded = functional.pad(pictures, (4, 4, 4, 4))
    top, left = torch.randint(0, 9, (2, count, 1, 1, 1), device=where)
    along = torch.arange(32, device=where)
    mirrored = torch.rand(count, 1, 1, 1, device=where) < 0.5
    rows = top + along[:, None]
    columns = left + torch.where(mirrored, along.flip(0), along)
    each = torch.arange(count, device=where)[:, None, None, None]
    colours = torch.arange(3, device=where)[:, None, None]
    return padded[each, colours, rows, columns]


def statistics(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the colours, of 255, for pictures (n, 3, 32, 32)."""
    mean, std = (torch.tensor(each, device=device)[:, None, None] for each in (MEAN, STD))
    return mean, std
