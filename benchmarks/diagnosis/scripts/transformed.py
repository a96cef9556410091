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


def framed(pictures: torch.Tensor) -> torch.Tensor:
    """Pictures (n, 3, 32, 32) with a black frame of four pixels, colours last: (n, 40, 40, 3)."""
    return functional.pad(pictures, (4, 4, 4, 4)).permute(0, 2, 3, 1).contiguous()


def windows(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns (count, 32) of framed pictures: cropped anywhere, mirrored every other."""
    top, left = torch.randint(0, 9, (2, count, 1), device=device)
    along = torch.arange(32, device=device)
    mirrored = torch.rand(count, 1, device=device) < 0.5
    return top + along, left + torch.where(mirrored, along.flip(0), along)


def normalising(device: torch.device, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What bytes are multiplied with, and what is added then."""
    mean, std = (torch.tensor(each, device=device) for each in (MEAN, STD))
    return (1 / (255 * std)).to(kind), (-mean / std).to(kind)
