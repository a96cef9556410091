"""Augmentation and normalization on the device as part of the step.

Random numbers and pixels are those of ``engines/torch``. JAX computes in 32 bits, so 64-bit
products are composed of 16-bit halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops

from nfold.data.arrays import DataSetArrays
from nfold.engines.base import Task
from nfold.engines.builtin_workloads import (
    OPERATION_KEYS,
    Operations,
    mean_levels,
)
from nfold.engines.distortion import TAPS, BatchDistortion
from nfold.engines.sampling import MASK, MULTIPLIERS, ROUNDS, WEYL

Tensor = Any
Draws = list[Tensor]  # four uint32 tensors [n] per operation
# uint8 images [n, h, w, c], uint32 ids [n], uint32 epoch [] to augmented images
Augment = Callable[[Tensor, Tensor, Tensor], Tensor]


def build_augmentation(operations: Operations, arrays: DataSetArrays, seed: int) -> Augment:
    """Return a function that applies ``operations`` (name, argument) in order."""

    def augment(images: Tensor, ids: Tensor, epoch: Tensor) -> Tensor:
        for name, argument in operations:
            drawn = draw_uint32(seed, epoch, ids, OPERATION_KEYS[name])
            images = AUGMENTATIONS[name](images, drawn, argument, arrays)
        return images

    return augment


def draw_uint32(seed: int, epoch: Tensor, ids: Tensor, operation: int) -> Draws:
    """Draw four uint32 [n] per sample id (Philox 4x32)."""
    zero = ops.zeros_like(ids)
    c0, c1, c2, c3 = ids, zero, zero + epoch, zero + _uint32(operation)
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(ROUNDS):
        high0, low0 = multiply_uint32(c0, MULTIPLIERS[0])
        high1, low1 = multiply_uint32(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = _xor(high1, c1, k0), low1, _xor(high0, c3, k1), low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return [c0, c1, c2, c3]


def multiply_uint32(value: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of the product of uint32 values and a 32-bit factor."""
    low_factor, high_factor = _uint32(factor & 0xFFFF), _uint32(factor >> 16)
    low, high = ops.bitwise_and(value, _uint32(0xFFFF)), _high_half(value)
    inner = high * low_factor + _high_half(low * low_factor)
    outer = low * high_factor + ops.bitwise_and(inner, _uint32(0xFFFF))
    return high * high_factor + _high_half(inner) + _high_half(outer), value * _uint32(factor)


def _high_half(value: Tensor) -> Tensor:
    return ops.right_shift(value, _uint32(16))


def _uint32(value: int) -> Tensor:
    return ops.convert_to_tensor(value, "uint32")


def _xor(first: Tensor, second: Tensor, key: int) -> Tensor:
    return ops.bitwise_xor(ops.bitwise_xor(first, second), _uint32(key))


def random_below(draw: Tensor, limit: int) -> Tensor:
    """Map 32-bit draws to int32 numbers 0 to ``limit`` - 1."""
    return ops.cast(multiply_uint32(draw, limit)[0], "int32")


def crop(images: Tensor, random: Draws, padding: int, _arrays: DataSetArrays) -> Tensor:
    """Crop after zero padding, at offsets from draws 0 (down) and 1 (right)."""
    n, (height, width, channels) = ops.shape(images)[0], images.shape[1:]

    def indices(draw: Tensor, side: int) -> Tensor:
        offsets = random_below(draw, 2 * padding + 1)[:, None]
        return offsets + ops.arange(-padding, side - padding, dtype="int32")

    rows, columns = indices(random[0], height), indices(random[1], width)
    inside = _in_range(rows, height)[:, :, None] & _in_range(columns, width)[:, None, :]
    first_rows = ops.arange(n, dtype="int32")[:, None, None] * height
    lines = first_rows + ops.clip(rows, 0, height - 1)[:, :, None]
    pixels = lines * width + ops.clip(columns, 0, width - 1)[:, None, :]
    cropped = ops.take(ops.reshape(images, (-1, channels)), pixels, axis=0)
    return ops.where(inside[..., None], cropped, ops.zeros_like(cropped))


def _in_range(indices: Tensor, limit: int) -> Tensor:
    return ops.logical_and(indices >= 0, indices < limit)


def flip(images: Tensor, random: Draws, _argument: int, _arrays: DataSetArrays) -> Tensor:
    """Mirror left to right by the highest bit of draw 0."""
    mirrored = random[0] >= _uint32(2**31)
    return ops.where(mirrored[:, None, None, None], ops.flip(images, 2), images)


def cutout(images: Tensor, random: Draws, size: int, arrays: DataSetArrays) -> Tensor:
    """Cover a square with the mean, centred at draws 0 (row) and 1 (column)."""
    height, width = images.shape[1:3]
    square = (
        _cutout_range(random[0], height, size)[:, :, None]
        & _cutout_range(random[1], width, size)[:, None, :]
    )
    return ops.where(square[..., None], ops.convert_to_tensor(mean_levels(arrays)), images)


def _cutout_range(drawn: Tensor, side: int, size: int) -> Tensor:
    first = random_below(drawn, side) - size // 2
    return _in_range(ops.arange(side, dtype="int32") - first[:, None], size)


AUGMENTATIONS: dict[str, Callable[[Tensor, Draws, int, DataSetArrays], Tensor]] = {
    "crop": crop,
    "flip": flip,
    "cutout": cutout,
}


class KerasDistortion(BatchDistortion):
    """Distorts images of different sizes, each in the upper left corner of a canvas.

    Resizing is two matrix products: a row holds the weights of the source pixels, most of them 0.
    This keeps the batch axis, which is split over devices, and costs about 2 % of the network at 299
    pixels.
    """

    ops = ops

    def draws(self, epoch: Tensor, ids: Tensor, operation: int) -> Draws:
        return draw_uint32(self._seed, epoch, ids, operation)

    def random_below(self, draw: Tensor, limit: int) -> Tensor:
        return random_below(draw, limit)

    def uniform(self, draw: Tensor, low: float, high: float) -> Tensor:
        return ops.cast(draw, "float32") * ((high - low) / 2**32) + low

    def highest_bit(self, draw: Tensor) -> Tensor:
        return draw >= _uint32(2**31)

    def __call__(self, canvases: Tensor, keys: Tensor, epoch: Tensor) -> Tensor:
        """Distort canvases [n, s, s, 3] to uint8 images [n, size, size, 3].

        ``keys`` uint32 [n, 3] are id, height and width of each image.
        """
        parameters = self.parameters(epoch, keys[:, 0])
        sizes = ops.cast(keys[:, 1:], "int32")
        rows = self._resize_matrix(sizes[:, 0], canvases.shape[1], parameters.method, None)
        columns = self._resize_matrix(
            sizes[:, 1], canvases.shape[2], parameters.method, parameters.mirrored
        )
        image = ops.einsum("nph,nhwc->npwc", rows, ops.cast(canvases, "float32"))
        image = ops.einsum("nqw,npwc->npqc", columns, image)
        return self.adjust_colours(ops.floor(ops.clip(image + 0.5, 0, 255)), parameters)

    def _resize_matrix(
        self, sides: Tensor, canvas: int, method: Tensor, mirrored: Tensor | None
    ) -> Tensor:
        pixels, taps, positions = (ops.arange(n, dtype="int32") for n in (self._size, TAPS, canvas))
        sources, weights = self.source_pixels(pixels, taps, sides, method, mirrored)
        total: Any = 0
        for tap in range(TAPS):
            hit = sources[..., tap, None] == positions
            total = total + ops.where(hit, weights[..., tap, None], 0.0)
        return total


# uint8 images [n, h, w, c], uint32 ids [n], uint32 epoch [] to the model's input; for distortion on
# the device canvases, and keys [n, 3] instead of ids
InputPreparation = Callable[[Tensor, Tensor, Tensor], Tensor]
Normalize = Callable[[Tensor], Tensor]


def build_normalizer(arrays: DataSetArrays, layout: str) -> Normalize:
    """Return a function that maps uint8 images [n, h, w, c] to normalized float32 in the layout."""
    mean = np.array(arrays.mean, np.float32)
    inverse_std = np.float32(1) / np.array(arrays.std, np.float32)

    def normalize(images: Tensor) -> Tensor:
        normal = (ops.cast(images, "float32") - mean) * inverse_std
        return ops.transpose(normal, (0, 3, 1, 2)) if layout == "channels_first" else normal

    return normalize


def build_preparation(
    arrays: DataSetArrays, task: Task, operations: Operations
) -> InputPreparation:
    """Return a function that augments, if the plan does so on the device, and normalizes."""
    normalize = build_normalizer(arrays, str(task.plan.layout))
    on_device = task.plan.augment == "device"
    if on_device and task.plan.decode is not None:
        distort = KerasDistortion(arrays.train_images.shape[1], task.plan.seed)
        return lambda canvases, keys, epoch: normalize(distort(canvases, keys, epoch))
    augment = build_augmentation(operations if on_device else (), arrays, task.plan.seed)

    def prepare(images: Tensor, ids: Tensor, epoch: Tensor) -> Tensor:
        return normalize(augment(images, ids, epoch))

    return prepare
