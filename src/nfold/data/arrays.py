"""A data set in memory: what every loader returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """Images as uint8 [n, height, width, channels] and labels as int64 [n], 0 to classes - 1.

    ``mean`` and ``std`` are the training images' per channel, on the scale 0 to 255, for
    normalising. The arrays may be memory maps and are never written to.
    """

    name: str
    classes: int
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    mean: tuple[float, ...]
    std: tuple[float, ...]


def channel_statistics(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of images [n, h, w, c], on 0 to 255."""
    counts = [np.bincount(images[..., c].ravel(), minlength=256) for c in range(images.shape[-1])]
    levels = np.arange(256)
    means = [float((levels * n).sum() / n.sum()) for n in counts]
    squares = [float((levels**2 * n).sum() / n.sum()) for n in counts]
    pairs = zip(squares, means, strict=True)
    return tuple(means), tuple(float(np.sqrt(s - m * m)) for s, m in pairs)
