"""Photographs as most people read them: one by one, by Pillow, distorted by torchvision.

Its colour jitter changes brightness by a factor, where Inception's distortion adds, and takes its
operations in any order: what people use in its place. Without torchvision the same by Pillow.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor
from torch.utils.data import Dataset

from nfold.data.packed_jpegs import PackedJpegs

try:
    from torchvision.transforms import v2
except ImportError:
    v2 = None

AREA = 0.05, 1.0
ASPECT = 3 / 4, 4 / 3


class Photographs(Dataset[tuple[Tensor, int]]):
    """Single photographs, decoded and distorted to float [3, size, size], -1 to 1."""

    def __init__(self, part: PackedJpegs, size: int, repeat: int) -> None:
        self._part, self._repeat = part, repeat
        self._transform = by_torchvision(size) if v2 else by_pillow(size)

    def __len__(self) -> int:
        return self._repeat * len(self._part)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = index % len(self._part)
        image = Image.open(io.BytesIO(self._part.jpeg(file).tobytes())).convert("RGB")
        return self._transform(image), int(self._part.labels[file])


def by_torchvision(size: int) -> Callable[[Any], Tensor]:
    composed: Callable[[Any], Tensor] = v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=AREA, ratio=ASPECT),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(brightness=32 / 255, contrast=0.5, saturation=0.5, hue=0.2),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    return composed


def by_pillow(size: int) -> Callable[[Any], Tensor]:
    def transform(image: Any) -> Tensor:
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=_box(*image.size))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image = ImageEnhance.Brightness(image).enhance(random.uniform(1 - 32 / 255, 1 + 32 / 255))
        image = ImageEnhance.Color(image).enhance(random.uniform(0.5, 1.5))
        image = ImageEnhance.Contrast(_turned(image)).enhance(random.uniform(0.5, 1.5))
        levels = torch.from_numpy(np.asarray(image).transpose(2, 0, 1).astype(np.float32))
        return levels / 127.5 - 1

    return transform


def _box(width: int, height: int) -> tuple[float, float, float, float]:
    for _ in range(10):
        area = random.uniform(*AREA) * width * height
        aspect = math.exp(random.uniform(*map(math.log, ASPECT)))
        wide, tall = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if wide <= width and tall <= height:
            left, top = random.uniform(0, width - wide), random.uniform(0, height - tall)
            return left, top, left + wide, top + tall
    return 0, 0, width, height


def _turned(image: Any) -> Any:
    hue, saturation, value = image.convert("HSV").split()
    by = round(random.uniform(-0.2, 0.2) * 255)
    turned = hue.point([(level + by) % 256 for level in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")
