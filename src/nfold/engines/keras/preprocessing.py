"""Augmentation and normalization on the device as part of the step.

Random numbers and pixels are those of ``engines/torch``. JAX computes in 32 bits, so 64-bit
products are composed of 16-bit halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from nfold.data.arrays import DataSetArrays
from nfold.data.distortion import AREA, BICUBIC, BRIGHTNESS, HUE, METHODS, NEAREST
from nfold.engines.base import Task
from nfold.engines.builtin_workloads import (
    COLOUR_KEY,
    DISTORTION_KEY,
    OPERATION_KEYS,
    Operations,
    mean_levels,
)
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


# Inception's distortion, with the random numbers and pixels of
# ``engines/torch/input/distortion.py``. Resizing is two matrix products: a row holds the weights of
# the source pixels, most of them 0. This keeps the batch axis, which is split over devices, and
# costs about 2 % of the network at 299 pixels.

TAPS = 4  # source pixels per side of a resized pixel, for bicubic
CUBIC_A = -0.75
HALF_RANGE = 2**31


@dataclass(frozen=True)
class KerasDistortionParameters:
    """``nfold.data.distortion.DistortionParameters`` of several samples, each [n]."""

    method: Tensor
    mirrored: Tensor
    contrast_second: Tensor
    brightness: Tensor
    saturation: Tensor
    hue: Tensor
    contrast: Tensor


def draw_distortion(seed: int, epoch: Tensor, ids: Tensor) -> KerasDistortionParameters:
    method, mirrored, order, brightness = draw_uint32(seed, epoch, ids, DISTORTION_KEY)
    saturation, hue, contrast, _ = draw_uint32(seed, epoch, ids, COLOUR_KEY)
    return KerasDistortionParameters(
        method=random_below(method, len(METHODS)),
        mirrored=mirrored >= _uint32(HALF_RANGE),
        contrast_second=order >= _uint32(HALF_RANGE),
        brightness=uniform(brightness, -BRIGHTNESS, BRIGHTNESS),
        saturation=uniform(saturation, 0.5, 1.5),
        hue=uniform(hue, -HUE, HUE),
        contrast=uniform(contrast, 0.5, 1.5),
    )


def uniform(draw: Tensor, low: float, high: float) -> Tensor:
    return ops.cast(draw, "float32") * ((high - low) / 2**32) + low


class KerasDistortion:
    """Distorts images of different sizes, each in the upper left corner of a canvas."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed

    def __call__(self, canvases: Tensor, keys: Tensor, epoch: Tensor) -> Tensor:
        """Distort canvases [n, s, s, 3] to uint8 images [n, size, size, 3].

        ``keys`` uint32 [n, 3] are id, height and width of each image.
        """
        parameters = draw_distortion(self._seed, epoch, keys[:, 0])
        sizes = ops.cast(keys[:, 1:], "int32")
        rows = self._resize_matrix(sizes[:, 0], canvases.shape[1], parameters.method, None)
        columns = self._resize_matrix(
            sizes[:, 1], canvases.shape[2], parameters.method, parameters.mirrored
        )
        image = ops.einsum("nph,nhwc->npwc", rows, ops.cast(canvases, "float32"))
        image = ops.einsum("nqw,npwc->npqc", columns, image)
        return adjust_colors(ops.floor(ops.clip(image + 0.5, 0, 255)), parameters)

    def _resize_matrix(
        self, sides: Tensor, canvas: int, method: Tensor, mirrored: Tensor | None
    ) -> Tensor:
        sources, weights = self._source_pixels(sides, method, mirrored)
        positions = ops.arange(canvas, dtype="int32")
        total: Any = 0
        for tap in range(TAPS):
            hit = sources[..., tap, None] == positions
            total = total + ops.where(hit, weights[..., tap, None], 0.0)
        return total

    def _source_pixels(
        self, sides: Tensor, method: Tensor, mirrored: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        size = self._size
        pixels = ops.arange(size, dtype="int32")[None]
        if mirrored is not None:
            pixels = ops.where(mirrored[:, None], size - 1 - pixels, pixels)
        sides, method = sides[:, None], method[:, None]
        scale = ops.cast(sides, "float32") / size
        place = ops.cast(pixels, "float32")
        middle, start = (place + 0.5) * scale - 0.5, place * scale
        under = ops.floor(middle)
        nearest = (2 * pixels + 1) * sides // (2 * size)
        whole = ops.where(method == AREA, ops.floor(start), under - 1)
        first = ops.where(method == NEAREST, nearest, ops.cast(whole, "int32"))
        sources = first[..., None] + ops.arange(TAPS, dtype="int32")
        weights = self._tap_weights(sources, middle - under, start, scale, method)
        return ops.minimum(ops.maximum(sources, 0), sides[..., None] - 1), weights

    def _tap_weights(
        self, sources: Tensor, past: Tensor, start: Tensor, scale: Tensor, method: Tensor
    ) -> Tensor:
        # [n, size, TAPS]; ``past`` is the distance of a pixel's centre from the second tap, 0 to 1.
        taps, method = ops.arange(TAPS, dtype="float32"), method[..., None]
        distance = ops.absolute(taps - 1 - past[..., None])
        begin, end = ops.cast(sources, "float32"), (start + scale)[..., None]
        covered = ops.minimum(begin + 1, end) - ops.maximum(begin, start[..., None])
        linear = ops.maximum(1 - distance, 0)
        weights = ops.where(method == BICUBIC, cubic_weight(distance), linear)
        weights = ops.where(method == AREA, ops.maximum(covered, 0) / scale[..., None], weights)
        return ops.where(method == NEAREST, ops.cast(taps == 0, "float32"), weights)


def cubic_weight(distance: Tensor) -> Tensor:
    """Return the bicubic weight at a distance of 0 to 2 (R. Keys, Cubic convolution, 1981)."""
    near = ((CUBIC_A + 2) * distance - (CUBIC_A + 3)) * distance * distance + 1
    far = ((CUBIC_A * distance - 5 * CUBIC_A) * distance + 8 * CUBIC_A) * distance - 4 * CUBIC_A
    return ops.where(distance <= 1, near, ops.where(distance < 2, far, 0.0))


def adjust_colors(levels: Tensor, parameters: KerasDistortionParameters) -> Tensor:
    """Change the colours of levels [n, h, w, 3], 0 to 255, and convert to uint8."""
    image = levels / 255 + parameters.brightness[:, None, None, None]
    second = parameters.contrast_second[:, None, None, None]
    factor = parameters.contrast[:, None, None, None]
    image = ops.maximum(adjust_contrast(image, ops.where(second, factor, 1.0)), 0)
    image = adjust_saturation_and_hue(
        image, parameters.saturation[:, None, None], parameters.hue[:, None, None]
    )
    image = adjust_contrast(image, ops.where(second, 1.0, factor))
    return ops.cast(ops.clip(image * 255 + 0.5, 0, 255), "uint8")


def adjust_contrast(image: Tensor, factor: Tensor) -> Tensor:
    """Scale the difference from the image's mean of each channel."""
    mean = ops.mean(image, axis=(1, 2), keepdims=True)
    return (image - mean) * factor + mean


def adjust_saturation_and_hue(image: Tensor, saturation: Tensor, hue_shift: Tensor) -> Tensor:
    """Change saturation, then hue, of images [n, h, w, 3]; a ``hue_shift`` of 1 is a full circle."""
    red, green, blue = image[..., 0], image[..., 1], image[..., 2]
    value = ops.max(image, axis=-1)
    chroma = value - ops.min(image, axis=-1)
    inverse = 1 / ops.maximum(chroma, 1e-12)
    place = ops.where(green == value, (blue - red) * inverse + 2, (red - green) * inverse + 4)
    place = ops.where(red == value, (green - blue) * inverse, place)
    place = ops.mod(place + 6 * hue_shift, 6)
    chroma = ops.minimum(chroma * saturation, value)
    shares = (
        ops.absolute(place - 3) - 1,
        2 - ops.absolute(place - 2),
        2 - ops.absolute(place - 4),
    )
    return ops.stack([value - chroma * (1 - ops.clip(part, 0, 1)) for part in shares], axis=-1)


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
