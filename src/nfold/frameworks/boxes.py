"""The random boxes of Inception's distortion, and at which reduced scale they are decoded.

TensorFlow's sample_distorted_bounding_box: an aspect ratio of 3/4 to 4/3, then a height such that
the box has 5 to 100 % of the image and lies in it, then a place. What is decoded, in each
placement, is the box at the smallest scale of 1, 1/2, 1/4, ... that loses nothing at the wanted
size, or at which it fits into a canvas. Drawn on the host, in every framework.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nfold.frameworks.philox import Ids, Words, draws, uniform_int

BOX_KEY = 4
"""Key of the operation, beside those of ``augment``; it never changes: results depend on it."""
MIN_AREA = 0.05
ASPECT_RATIOS = 3 / 4, 4 / 3
CANVAS_SCALE = 1.7
"""A canvas's side over an image's: 512 for 299, which holds a whole photograph of ImageNet."""
CANVAS_STEP = 32
REDUCTIONS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Beyond 1, as far as the largest JPEG (65,535 pixels a side) and the smallest canvas need."""


def canvas_side(size: int) -> int:
    """Pixels of the side of the square that holds any box which is resized to ``size``."""
    return -(-round(CANVAS_SCALE * size) // CANVAS_STEP) * CANVAS_STEP


def uniform_float(draw: Words, low: float, high: float) -> npt.NDArray[np.float64]:
    """Map 32-bit draws to numbers from ``low`` to below ``high``."""
    return draw.astype(np.float64) * ((high - low) / 2**32) + low


def draw_boxes(seed: int, epoch: int, ids: Ids, sizes: Ids) -> Ids:
    """A box (top, left, height, width) for each sample: int64 [n, 4].

    ``sizes`` are the images' heights and widths, int64 [n, 2]. An image that is 15 times as wide
    as high, or more, may have no such box: then it is the whole of it.
    """
    ratio, share, down, right = draws(seed, epoch, ids, BOX_KEY)
    height, width = sizes.T
    aspect = uniform_float(ratio, *ASPECT_RATIOS)
    highest = np.minimum(np.round(np.sqrt(height * width / aspect)), height)
    highest = np.minimum(highest, np.floor((width + 0.5 - 1e-7) / aspect))
    least = np.maximum(np.round(np.sqrt(MIN_AREA * height * width / aspect)), 1)
    possible = least <= highest
    tall = least + np.floor(uniform_float(share, 0, 1) * (highest - least + 1))
    wide = np.clip(np.round(tall * aspect), 1, width)
    tall = np.where(possible, tall.astype(np.int64), height)
    wide = np.where(possible, wide.astype(np.int64), width)
    top, left = uniform_int(down, height - tall + 1), uniform_int(right, width - wide + 1)
    return np.stack([top, left, tall, wide], axis=1)


def decode_reductions(boxes: Ids, size: int) -> Ids:
    """By how much each box [n, 4] is reduced when it is decoded, a power of two: int64 [n]."""
    tall, wide = boxes[:, 2], boxes[:, 3]
    chosen = np.ones_like(tall)
    for power in REDUCTIONS:
        lossless = np.minimum(tall, wide) >= power * size
        too_large = np.maximum(tall, wide) // chosen > canvas_side(size)
        chosen = np.where(lossless | too_large, power, chosen)
    return chosen


def scale_boxes(boxes: Ids, reductions: Ids) -> Ids:
    """The boxes [n, 4] in images that are reduced by ``by`` [n], at least one pixel large."""
    smaller = boxes // reductions[:, None]
    return np.concatenate([smaller[:, :2], np.maximum(smaller[:, 2:], 1)], axis=1)
