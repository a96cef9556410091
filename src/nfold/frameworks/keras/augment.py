"""Random crop, flip and cutout on the device, fused into the step: draws of ``torch/augment.py``.

JAX computes with 32 bits unless it is told otherwise for everything, so a 64-bit product is
put together from halves of 16 bits. The pixels are those of ``frameworks/augment.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops

from nfold.data.arrays import DataSetArrays
from nfold.frameworks.augment import OPERATION_KEYS, Operations, mean_levels
from nfold.frameworks.philox import MASK, MULTIPLIERS, ROUNDS, WEYL

Tensor = Any
Draws = list[Tensor]
"""Four uint32 tensors [n], one operation's draws."""
Augment = Callable[[Tensor, Tensor, Tensor], Tensor]
"""uint8 images [n, h, w, c], uint32 ids [n] and a uint32 epoch [] to augmented images."""


def build_augmentation(operations: Operations, arrays: DataSetArrays, seed: int) -> Augment:
    """Applies ``operations``, pairs of a name and an argument, in order; none changes nothing."""

    def augment(images: Tensor, ids: Tensor, epoch: Tensor) -> Tensor:
        for name, argument in operations:
            drawn = draw_uint32(seed, epoch, ids, OPERATION_KEYS[name])
            images = AUGMENTATIONS[name](images, drawn, argument, arrays)
        return images

    return augment


def draw_uint32(seed: int, epoch: Tensor, ids: Tensor, operation: int) -> Draws:
    """Four independent 32-bit draws per sample id below 2^32: uint32 [n]."""
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
    """High and low 32 bits of the product of uint32 values and a factor of 32 bits."""
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
    """Pads with zeros and cuts the size out again, by draws 0 (down) and 1 (right).

    Nothing is padded: what would come from the border is zero.
    """
    n, (height, width, channels) = ops.shape(images)[0], images.shape[1:]
    places = 2 * padding + 1
    rows = random_below(random[0], places)[:, None] + ops.arange(
        -padding, height - padding, dtype="int32"
    )
    columns = random_below(random[1], places)[:, None] + ops.arange(
        -padding, width - padding, dtype="int32"
    )
    inside = _in_range(rows, height)[:, :, None] & _in_range(columns, width)[:, None, :]
    each = ops.arange(n, dtype="int32")[:, None, None]
    lines = each * height + ops.clip(rows, 0, height - 1)[:, :, None]
    pixels = lines * width + ops.clip(columns, 0, width - 1)[:, None, :]
    taken = ops.take(ops.reshape(images, (-1, channels)), pixels, axis=0)
    return ops.where(inside[..., None], taken, ops.zeros_like(taken))


def _in_range(places: Tensor, limit: int) -> Tensor:
    return ops.logical_and(places >= 0, places < limit)


def flip(images: Tensor, random: Draws, _argument: int, _arrays: DataSetArrays) -> Tensor:
    """Mirrors left to right by the highest bit of draw 0."""
    mirrored = random[0] >= _uint32(2**31)
    return ops.where(mirrored[:, None, None, None], ops.flip(images, 2), images)


def cutout(images: Tensor, random: Draws, size: int, arrays: DataSetArrays) -> Tensor:
    """Covers a square with the mean, its centre at draws 0 (row) and 1 (column)."""
    height, width = images.shape[1:3]
    square = (
        _cutout_range(random[0], height, size)[:, :, None]
        & _cutout_range(random[1], width, size)[:, None, :]
    )
    return ops.where(square[..., None], ops.convert_to_tensor(mean_levels(arrays)), images)


def _cutout_range(drawn: Tensor, side: int, size: int) -> Tensor:
    """Which places [side] lie under each image's square: bool [n, side]."""
    first = random_below(drawn, side) - size // 2
    return _in_range(ops.arange(side, dtype="int32") - first[:, None], size)


AUGMENTATIONS: dict[str, Callable[[Tensor, Draws, int, DataSetArrays], Tensor]] = {
    "crop": crop,
    "flip": flip,
    "cutout": cutout,
}
