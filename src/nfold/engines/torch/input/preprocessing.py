"""Random augmentation and normalisation of image batches in PyTorch.

A draw is a function of seed, epoch, sample id and operation, the same on every device and any number
of devices. Augmentation runs on uint8 images in a loader's worker or on the device with the same pixels, and
can be captured in a CUDA graph: nothing waits for the host, and no shape depends on a draw.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nfold.data.arrays import DataSetArrays
from nfold.engines.builtin_workloads import OPERATION_KEYS, mean_levels
from nfold.engines.sampling import MASK, philox
from nfold.engines.torch.layout import to_layout


def draws(seed: int, epoch: int | Tensor, ids: Tensor, operation: int | Tensor) -> list[Tensor]:
    """Return four independent 32-bit draws per sample id: int64 tensors like ``ids``.

    ``operation`` is the key of the draws. Operations [k, 1] give draws [k, n] for ids [n] in one
    call. An epoch that is an int64 tensor [] on the device of ``ids`` is read when the arithmetic
    runs, so that a CUDA graph draws the numbers of the current epoch.
    """
    low, high = ids & MASK, (ids >> 32) & MASK
    counter = (low, high, _word(epoch, ids.device), _word(operation, ids.device))
    return philox(counter, (seed & MASK, (seed >> 32) & MASK))


def _word(value: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value & MASK
    return torch.full((), value & MASK, dtype=torch.int64, device=device)


def uniform_int(draw: Tensor, limit: int | Tensor) -> Tensor:
    """Map 32-bit draws to whole numbers 0 to ``limit`` - 1 (Lemire's multiplication, 2019)."""
    return (draw * limit) >> 32


Draws = list[Tensor]  # four int64 tensors [n] of 32-bit draws of one operation
Operation = Callable[[Tensor, Draws], Tensor]  # images [n, h, w, c] and their draws -> images
# images [n, h, w, c], sample ids [n], epoch -> images
Augment = Callable[[Tensor, Tensor, "int | Tensor"], Tensor]


def build_augmentation(
    operations: tuple[tuple[str, int], ...], arrays: DataSetArrays, seed: int, device: torch.device
) -> Augment:
    """Return a function that applies ``operations`` (name, argument) in order."""
    return Augmentation(operations, arrays, seed, device) if operations else keep_images


def keep_images(images: Tensor, _ids: Tensor, _epoch: int | Tensor) -> Tensor:
    return images


class Augmentation:
    """A workload's operations on one device, for the images of one data set.

    All operations draw in one call of the generator, so that its 120 small kernels are launched
    once per step, not once per operation.
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
        words = draws(self._seed, epoch, ids, self._keys)
        for row, operation in enumerate(self._operations):
            images = operation(images, [word[row] for word in words])
        return images


class Crop:
    """Pads every side with zeros and cuts out the original size at a random position."""

    def __init__(self, padding: int, arrays: DataSetArrays, device: torch.device) -> None:
        height, width = arrays.train_images.shape[1:3]
        self._padding = padding
        self._rows = torch.arange(height, device=device)
        self._columns = torch.arange(width, device=device)

    def __call__(self, images: Tensor, drawn: Draws) -> Tensor:
        by, positions = self._padding, 2 * self._padding + 1
        rows = uniform_int(drawn[0], positions)[:, None] + self._rows
        columns = uniform_int(drawn[1], positions)[:, None] + self._columns
        padded = torch.nn.functional.pad(images, (0, 0, by, by, by, by))
        each = torch.arange(len(images), device=images.device)[:, None, None]
        return padded[each, rows[:, :, None], columns[:, None, :]]


class Flip:
    """Mirrors each image left to right with probability one half."""

    def __init__(self, _argument: int, _arrays: DataSetArrays, _device: torch.device) -> None:
        pass

    def __call__(self, images: Tensor, drawn: Draws) -> Tensor:
        mirrored = (drawn[0] >> 31).bool()
        return torch.where(mirrored[:, None, None, None], images.flip(2), images)


class Cutout:
    """Covers a square of ``size`` pixels, centred anywhere in the image, with the mean.

    T. DeVries and G. Taylor, Improved Regularization of Convolutional Neural Networks with Cutout
    (arXiv:1708.04552, 2017). They fill normalised images with zeros, which is the training images'
    mean per channel; here it is the nearest of 256 levels.
    """

    def __init__(self, size: int, arrays: DataSetArrays, device: torch.device) -> None:
        height, width = arrays.train_images.shape[1:3]
        self._size = size
        self._rows = torch.arange(height, device=device)
        self._columns = torch.arange(width, device=device)
        self._fill = torch.from_numpy(mean_levels(arrays)).to(device)

    def __call__(self, images: Tensor, drawn: Draws) -> Tensor:
        rows = self._covered_positions(drawn[0], self._rows)
        columns = self._covered_positions(drawn[1], self._columns)
        square = rows[:, :, None] & columns[:, None, :]
        return torch.where(square[..., None], self._fill, images)

    def _covered_positions(self, drawn: Tensor, positions: Tensor) -> Tensor:
        first = uniform_int(drawn, len(positions)) - self._size // 2
        distance = positions - first[:, None]
        return (distance >= 0) & (distance < self._size)


AUGMENTATIONS: dict[str, Callable[[int, DataSetArrays, torch.device], Operation]] = {
    "crop": Crop,
    "flip": Flip,
    "cutout": Cutout,
}


# samples on the host or the device -> input of the model on the device
Normalize = Callable[[Tensor], Tensor]


def build_normalizer(arrays: DataSetArrays, layout: str, device: torch.device) -> Normalize:
    """Return the normalisation of images; other samples are only moved to the device."""
    if arrays.mean:
        return Normalizer(arrays, layout, device)
    return lambda samples: samples.to(device, non_blocking=True)


class Normalizer:
    """Moves uint8 images [n, h, w, c] to the device and returns float [n, c, h, w] there.

    Bytes take a quarter of the traffic of floats. Each channel is normalised by the training
    images' mean and standard deviation.
    """

    def __init__(self, arrays: DataSetArrays, layout: str, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._mean = torch.tensor(arrays.mean, device=device)
        self._inverse_std = 1 / torch.tensor(arrays.std, device=device)

    def __call__(self, images: Tensor) -> Tensor:
        on_device = images.to(self._device, non_blocking=True)
        normal = (on_device.float() - self._mean) * self._inverse_std
        return to_layout(normal.permute(0, 3, 1, 2), self._layout)
