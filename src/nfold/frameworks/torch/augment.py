"""Random crop, flip and cutout of a batch of images, each sample with its own draws.

The same arithmetic runs in a loader's worker and on the device, on uint8 images and without a
loop over them, so that where it runs changes no pixel. On a device it can be captured in a CUDA
graph: nothing waits for the host, no shape depends on a draw, and constants are made once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nfold.data.arrays import DataSetArrays
from nfold.frameworks.augment import OPERATION_KEYS, mean_levels
from nfold.frameworks.torch.philox import draws, uniform_int

Draws = list[Tensor]
"""Four int64 tensors [n] of 32-bit draws, one operation's."""
Operation = Callable[[Tensor, Draws], Tensor]
"""Images [n, h, w, c] and their draws to images of the same shape."""
Augment = Callable[[Tensor, Tensor, "int | Tensor"], Tensor]
"""Images [n, h, w, c], the ids [n] of their samples and the epoch to augmented images."""


def build_augmentation(
    operations: tuple[tuple[str, int], ...], arrays: DataSetArrays, seed: int, device: torch.device
) -> Augment:
    """Applies ``operations``, pairs of a name and an argument, in order; none changes nothing."""
    return Augmentation(operations, arrays, seed, device) if operations else keep_images


def keep_images(images: Tensor, _ids: Tensor, _epoch: int | Tensor) -> Tensor:
    """The images as they are."""
    return images


class Augmentation:
    """A workload's operations on one device, for the images of one data set.

    All operations draw in one call of the generator: on a GPU its 120 small kernels are then
    launched once a step, not once per operation.
    """

    def __init__(
        self,
        operations: tuple[tuple[str, int], ...],
        arrays: DataSetArrays,
        seed: int,
        device: torch.device,
    ) -> None:
        keys = [OPERATION_KEYS[name] for name, _ in operations]
        self._keys = torch.tensor(keys, device=device)[:, None]
        self._operations = [
            AUGMENTATIONS[name](argument, arrays, device) for name, argument in operations
        ]
        self._seed = seed

    def __call__(self, images: Tensor, ids: Tensor, epoch: int | Tensor) -> Tensor:
        """Augmented uint8 images of the samples ``ids`` [n], in ``epoch``."""
        words = draws(self._seed, epoch, ids, self._keys)
        for row, operation in enumerate(self._operations):
            images = operation(images, [word[row] for word in words])
        return images


class Crop:
    """Pads every side with zeros and cuts the original size out at a random place."""

    def __init__(self, padding: int, arrays: DataSetArrays, device: torch.device) -> None:
        height, width = arrays.train_images.shape[1:3]
        self._padding = padding
        self._rows = torch.arange(height, device=device)
        self._columns = torch.arange(width, device=device)

    def __call__(self, images: Tensor, drawn: Draws) -> Tensor:
        """Images [n, h, w, c] by draws 0 (down) and 1 (right)."""
        by, places = self._padding, 2 * self._padding + 1
        rows = uniform_int(drawn[0], places)[:, None] + self._rows
        columns = uniform_int(drawn[1], places)[:, None] + self._columns
        padded = torch.nn.functional.pad(images, (0, 0, by, by, by, by))
        each = torch.arange(len(images), device=images.device)[:, None, None]
        return padded[each, rows[:, :, None], columns[:, None, :]]


class Flip:
    """Mirrors each image left to right with probability one half."""

    def __init__(self, _argument: int, _arrays: DataSetArrays, _device: torch.device) -> None:
        pass

    def __call__(self, images: Tensor, drawn: Draws) -> Tensor:
        """Images [n, h, w, c] by the highest bit of draw 0."""
        mirrored = (drawn[0] >> 31).bool()
        return torch.where(mirrored[:, None, None, None], images.flip(2), images)


class Cutout:
    """Covers a square of ``size`` pixels, its centre anywhere in the image, with the mean.

    T. DeVries and G. Taylor, Improved Regularization of Convolutional Neural Networks with
    Cutout (arXiv:1708.04552, 2017): every image gets one, and where it lies over a border only
    the part inside counts. They fill normalised images with zeros, which is the training
    images' mean per channel; on uint8 images it is the nearest of 256 levels.
    """

    def __init__(self, size: int, arrays: DataSetArrays, device: torch.device) -> None:
        height, width = arrays.train_images.shape[1:3]
        self._size = size
        self._rows = torch.arange(height, device=device)
        self._columns = torch.arange(width, device=device)
        self._fill = torch.from_numpy(mean_levels(arrays)).to(device)

    def __call__(self, images: Tensor, drawn: Draws) -> Tensor:
        """Images [n, h, w, c] by draws 0 (the centre's row) and 1 (its column)."""
        rows = self._covered_positions(drawn[0], self._rows)
        columns = self._covered_positions(drawn[1], self._columns)
        square = rows[:, :, None] & columns[:, None, :]
        return torch.where(square[..., None], self._fill, images)

    def _covered_positions(self, drawn: Tensor, places: Tensor) -> Tensor:
        """Which places [side] lie under each image's square: bool [n, side]."""
        first = uniform_int(drawn, len(places)) - self._size // 2
        distance = places - first[:, None]
        return (distance >= 0) & (distance < self._size)


AUGMENTATIONS: dict[str, Callable[[int, DataSetArrays, torch.device], Operation]] = {
    "crop": Crop,
    "flip": Flip,
    "cutout": Cutout,
}
