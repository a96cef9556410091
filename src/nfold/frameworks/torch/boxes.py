"""The random boxes of Inception's distortion, and at which reduced scale they are decoded.

TensorFlow's sample_distorted_bounding_box: an aspect ratio of 3/4 to 4/3, then a height such that
the box has 5 to 100 % of the image and lies in it, then a place. What is decoded, in each
placement, is the box at the smallest scale of 1, 1/2, 1/4, ... that loses nothing at the wanted
size, or at which it fits into a canvas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nfold.frameworks.torch.philox import below, draws

BOX = 4
"""Key of the operation, beside those of ``augment``; it never changes: results depend on it."""
LEAST_AREA = 0.05
ASPECTS = 3 / 4, 4 / 3
CANVAS = 1.7
"""A canvas's side over an image's: 512 for 299, which holds a whole photograph of ImageNet."""
STEP = 32
REDUCTIONS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Beyond 1, as far as the largest JPEG (65,535 pixels a side) and the smallest canvas need."""


def canvas_side(size: int) -> int:
    """Pixels of the side of the square that holds any box which is resized to ``size``."""
    return -(-round(CANVAS * size) // STEP) * STEP


def uniform(draw: Tensor, low: float, high: float) -> Tensor:
    """Map 32-bit draws to numbers from ``low`` to below ``high``, float64."""
    return draw.double() * ((high - low) / 2**32) + low


def boxes(seed: int, epoch: int | Tensor, ids: Tensor, sizes: Tensor) -> Tensor:
    """A box (top, left, height, width) for each sample: int64 [n, 4].

    ``sizes`` are the images' heights and widths, int64 [n, 2]. An image that is 15 times as wide
    as high, or more, may have no such box: then it is the whole of it.
    """
    ratio, share, down, right = draws(seed, epoch, ids, BOX)
    height, width = sizes.unbind(1)
    aspect = uniform(ratio, *ASPECTS)
    highest = (height * width / aspect).sqrt().round().minimum(height.double())
    highest = highest.minimum(((width + 0.5 - 1e-7) / aspect).floor())
    least = (LEAST_AREA * height * width / aspect).sqrt().round().clamp(min=1)
    possible = least <= highest
    tall = least + (uniform(share, 0, 1) * (highest - least + 1)).floor()
    wide = (tall * aspect).round().clamp(min=1).minimum(width.double())
    tall = torch.where(possible, tall.long(), height)
    wide = torch.where(possible, wide.long(), width)
    top, left = below(down, height - tall + 1), below(right, width - wide + 1)
    return torch.stack([top, left, tall, wide], dim=1)


def reductions(found: Tensor, size: int) -> Tensor:
    """By how much each box [n, 4] is reduced when it is decoded, a power of two: int64 [n]."""
    tall, wide = found[:, 2], found[:, 3]
    chosen = torch.ones_like(tall)
    for power in REDUCTIONS:
        lossless = tall.minimum(wide) >= power * size
        too_large = tall.maximum(wide) // chosen > canvas_side(size)
        chosen = torch.where(lossless | too_large, power, chosen)
    return chosen


def reduced(found: Tensor, by: Tensor) -> Tensor:
    """The boxes [n, 4] in images that are reduced by ``by`` [n], at least one pixel large."""
    smaller = found // by[:, None]
    return torch.cat([smaller[:, :2], smaller[:, 2:].clamp(min=1)], dim=1)
