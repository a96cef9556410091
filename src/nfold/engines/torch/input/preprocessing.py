"""Random augmentation, distortion and normalisation of image batches in PyTorch.

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
from nfold.engines.distortion import TAPS, BatchDistortion, DistortionParameterBatch
from nfold.engines.sampling import MASK, philox
from nfold.engines.torch.batch import CanvasTensors
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


class PixelOperation:
    def __init__(self, argument: int, arrays: DataSetArrays, device: torch.device) -> None:
        height, width = arrays.train_images.shape[1:3]
        self._argument = argument
        self._rows = torch.arange(height, device=device)
        self._columns = torch.arange(width, device=device)


class Crop(PixelOperation):
    """Pads every side with zeros and cuts out the original size at a random position."""

    def __call__(self, images: Tensor, drawn: Draws) -> Tensor:
        by, positions = self._argument, 2 * self._argument + 1
        rows = uniform_int(drawn[0], positions)[:, None] + self._rows
        columns = uniform_int(drawn[1], positions)[:, None] + self._columns
        padded = torch.nn.functional.pad(images, (0, 0, by, by, by, by))
        each = torch.arange(len(images), device=images.device)[:, None, None]
        return padded[each, rows[:, :, None], columns[:, None, :]]


class Flip(PixelOperation):
    """Mirrors each image left to right with probability one half."""

    def __call__(self, images: Tensor, drawn: Draws) -> Tensor:
        mirrored = (drawn[0] >> 31).bool()
        return torch.where(mirrored[:, None, None, None], images.flip(2), images)


class Cutout(PixelOperation):
    """Covers a square of ``argument`` pixels, centred anywhere in the image, with the mean.

    T. DeVries and G. Taylor, Improved Regularization of Convolutional Neural Networks with Cutout
    (arXiv:1708.04552, 2017). They fill normalised images with zeros, which is the training images'
    mean per channel; here it is the nearest of 256 levels.
    """

    def __init__(self, argument: int, arrays: DataSetArrays, device: torch.device) -> None:
        super().__init__(argument, arrays, device)
        self._fill = torch.from_numpy(mean_levels(arrays)).to(device)

    def __call__(self, images: Tensor, drawn: Draws) -> Tensor:
        rows = self._covered_positions(drawn[0], self._rows)
        columns = self._covered_positions(drawn[1], self._columns)
        square = rows[:, :, None] & columns[:, None, :]
        return torch.where(square[..., None], self._fill, images)

    def _covered_positions(self, drawn: Tensor, positions: Tensor) -> Tensor:
        first = uniform_int(drawn, len(positions)) - self._argument // 2
        distance = positions - first[:, None]
        return (distance >= 0) & (distance < self._argument)


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


class TorchOps:
    """The functions of ``keras.ops`` that the distortion needs. An index is int64."""

    absolute, clip, floor, minimum = torch.abs, torch.clamp, torch.floor, torch.minimum
    mod = torch.remainder
    where = staticmethod(lambda condition, *values: torch.where(condition.bool(), *values))
    max = staticmethod(lambda values, axis: values.amax(axis))
    min = staticmethod(lambda values, axis: values.amin(axis))
    mean = staticmethod(lambda values, axis, keepdims: values.mean(axis, keepdim=keepdims))
    stack = staticmethod(lambda values, axis: torch.stack(values, dim=axis))

    @staticmethod
    def cast(values: Tensor, dtype: str) -> Tensor:
        return values.to(torch.int64 if dtype == "int32" else getattr(torch, dtype))

    @staticmethod
    def maximum(values: Tensor, other: Tensor | float) -> Tensor:
        return values.maximum(other) if isinstance(other, Tensor) else values.clamp(min=other)


class DeviceDistortion(BatchDistortion):
    """Distorts the images of canvases: CanvasTensors and epoch to uint8 [n, size, size, 3]."""

    ops = TorchOps

    def __init__(self, size: int, seed: int, device: torch.device) -> None:
        super().__init__(size, seed)
        self._pixels = torch.arange(size, device=device)
        self._taps = torch.arange(TAPS, device=device)

    def draws(self, epoch: int | Tensor, ids: Tensor, operation: int) -> Draws:
        return draws(self._seed, epoch, ids, operation)

    def random_below(self, draw: Tensor, limit: int) -> Tensor:
        return uniform_int(draw, limit)

    def uniform(self, draw: Tensor, low: float, high: float) -> Tensor:
        return (draw.double() * ((high - low) / 2**32) + low).float()

    def highest_bit(self, draw: Tensor) -> Tensor:
        return draw >> 31

    def __call__(self, samples: CanvasTensors, epoch: Tensor) -> Tensor:
        with torch.autocast(samples.images.device.type, enabled=False):
            parameters = self.parameters(epoch, samples.ids)
            resized = self._resize(samples.images, samples.sizes, parameters)
            result: Tensor = self.adjust_colours(resized, parameters)
            return result

    def _resize(
        self, canvases: Tensor, sizes: Tensor, parameters: DistortionParameterBatch
    ) -> Tensor:
        """Whole levels as float [n, size, size, 3].

        Resizes rows, transposes, and resizes the columns as rows: a row is contiguous.
        """
        ranges, method = (self._pixels, self._taps), parameters.method
        rows = self.source_pixels(*ranges, sizes[:, 0], method, None)
        columns = self.source_pixels(*ranges, sizes[:, 1], method, parameters.mirrored)
        transposed = weighted_rows(canvases, *rows).transpose(1, 2).contiguous()
        image = weighted_rows(transposed, *columns)
        return (image.transpose(1, 2) + 0.5).clamp(0, 255).floor()


def weighted_rows(images: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return weighted sums of rows of images [n, h, w, c]: float [n, size, w, c].

    ``rows`` int64 [n, size, taps] are their indices, ``weights`` their weights.
    """
    count, height = images.shape[:2]
    first = torch.arange(count, device=images.device)[:, None] * height
    flat = images.flatten(0, 1)
    shape = (*rows.shape[:2], *images.shape[2:])
    total = torch.zeros(shape, device=images.device)
    for tap in range(rows.shape[2]):
        row = flat.index_select(0, (first + rows[..., tap]).flatten()).view(shape)
        total += row * weights[..., tap, None, None]
    return total
