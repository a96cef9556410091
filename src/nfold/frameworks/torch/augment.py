"""Random crop and flip of a batch of images, each sample with its own draws, without a loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nfold.frameworks.torch.philox import below, draws

SHUFFLE = 0
CROP = 1
FLIP = 2


def augment(
    images: Tensor, ids: Tensor, seed: int, epoch: int, operations: tuple[tuple[str, int], ...]
) -> Tensor:
    """Apply ``operations`` in order to uint8 images [n, h, w, c] of the samples ``ids`` [n]."""
    for name, argument in operations:
        images = OPERATIONS[name](images, ids, seed, epoch, argument)
    return images


def crop(images: Tensor, ids: Tensor, seed: int, epoch: int, padding: int) -> Tensor:
    """Pad every side with ``padding`` zeros and cut the original size out at a random place."""
    n, height, width, _ = images.shape
    down, right, _, _ = draws(seed, epoch, ids, CROP)
    places = 2 * padding + 1
    rows = below(down, places)[:, None] + torch.arange(height, device=images.device)
    columns = below(right, places)[:, None] + torch.arange(width, device=images.device)
    padded = torch.nn.functional.pad(images, (0, 0, padding, padding, padding, padding))
    each = torch.arange(n, device=images.device)[:, None, None]
    return padded[each, rows[:, :, None], columns[:, None, :]]


def flip(images: Tensor, ids: Tensor, seed: int, epoch: int, _: int) -> Tensor:
    """Mirror each image left to right with probability one half."""
    mirrored = (draws(seed, epoch, ids, FLIP)[0] >> 31).bool()
    return torch.where(mirrored[:, None, None, None], images.flip(2), images)


OPERATIONS: dict[str, Callable[[Tensor, Tensor, int, int, int], Tensor]] = {
    "crop": crop,
    "flip": flip,
}
