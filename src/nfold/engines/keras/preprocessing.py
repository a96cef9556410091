"""Random crop, flip and cutout on the device, fused into the step: draws of ``torch/augment.py``.

JAX computes with 32 bits unless it is told otherwise for everything, so a 64-bit product is
put together from halves of 16 bits. The pixels are those of ``frameworks/augment.py``.
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
Draws = list[Tensor]  # four uint32 tensors [n], one operation's draws
# uint8 images [n, h, w, c], uint32 ids [n] and a uint32 epoch [] to augmented images
Augment = Callable[[Tensor, Tensor, Tensor], Tensor]


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
    first = random_below(drawn, side) - size // 2
    return _in_range(ops.arange(side, dtype="int32") - first[:, None], size)


AUGMENTATIONS: dict[str, Callable[[Tensor, Draws, int, DataSetArrays], Tensor]] = {
    "crop": crop,
    "flip": flip,
    "cutout": cutout,
}


# Inception's distortion fused into the step: draws and pixels of ``torch/distortion.py``.
#
# A resized image is a product of matrices here: which pixels a pixel sees is a row of weights, most
# of them 0. Products keep the batch's axis, along which it is split over devices, and take about 2 %
# of what the network does at 299. In 32 bits, as JAX computes.

TAPS = 4  # pixels that one pixel of a resized image may see of each side: four for bicubic
CUBIC_A = -0.75
HALF_RANGE = 2**31


@dataclass(frozen=True)
class KerasDistortionParameters:
    """What samples drew besides their boxes, each [n]; ``nfold.data.distortion.Look`` of many."""

    method: Tensor
    mirrored: Tensor
    contrast_second: Tensor
    brightness: Tensor
    saturation: Tensor
    hue: Tensor
    contrast: Tensor


def draw_distortion(seed: int, epoch: Tensor, ids: Tensor) -> KerasDistortionParameters:
    """The looks of samples ``ids`` uint32 [n] in an epoch."""
    method, mirrored, order, brightness = draw_uint32(seed, epoch, ids, DISTORTION_KEY)
    saturation, hue, contrast, _ = draw_uint32(seed, epoch, ids, COLOUR_KEY)
    return KerasDistortionParameters(
        method=random_below(method, len(METHODS)),
        mirrored=mirrored >= _to_uint32(HALF_RANGE),
        contrast_second=order >= _to_uint32(HALF_RANGE),
        brightness=uniform(brightness, -BRIGHTNESS, BRIGHTNESS),
        saturation=uniform(saturation, 0.5, 1.5),
        hue=uniform(hue, -HUE, HUE),
        contrast=uniform(contrast, 0.5, 1.5),
    )


def _to_uint32(value: int) -> Tensor:
    return ops.convert_to_tensor(value, "uint32")


def uniform(draw: Tensor, low: float, high: float) -> Tensor:
    """Map 32-bit draws to float32 numbers from ``low`` to ``high``."""
    return ops.cast(draw, "float32") * ((high - low) / 2**32) + low


class KerasDistortion:
    """Distorts what lies in canvases, in one go."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed

    def __call__(self, canvases: Tensor, marks: Tensor, epoch: Tensor) -> Tensor:
        """uint8 images [n, size, size, 3] of canvases [n, s, s, 3].

        ``marks`` uint32 [n, 3] are a sample's id, and height and width of what lies in the upper
        left corner of its canvas.
        """
        look = draw_distortion(self._seed, epoch, marks[:, 0])
        places = ops.cast(marks[:, 1:], "int32")
        rows = self._resize_matrix(places[:, 0], canvases.shape[1], look.method, None)
        columns = self._resize_matrix(places[:, 1], canvases.shape[2], look.method, look.mirrored)
        image = ops.einsum("nph,nhwc->npwc", rows, ops.cast(canvases, "float32"))
        image = ops.einsum("nqw,npwc->npqc", columns, image)
        return adjust_colors(ops.floor(ops.clip(image + 0.5, 0, 255)), look)

    def _resize_matrix(
        self, sides: Tensor, canvas: int, method: Tensor, mirrored: Tensor | None
    ) -> Tensor:
        found, weights = self._source_pixels(sides, method, mirrored)
        places = ops.arange(canvas, dtype="int32")
        total: Any = 0
        for tap in range(TAPS):
            hit = found[..., tap, None] == places
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
        found = first[..., None] + ops.arange(TAPS, dtype="int32")
        weights = self._tap_weights(found, middle - under, start, scale, method)
        return ops.minimum(ops.maximum(found, 0), sides[..., None] - 1), weights

    def _tap_weights(
        self, found: Tensor, past: Tensor, start: Tensor, scale: Tensor, method: Tensor
    ) -> Tensor:
        """The weights [n, size, 4] of each sample's own method.

        ``past`` is how far a pixel's middle lies beyond the second tap's, 0 to 1.
        """
        taps, method = ops.arange(TAPS, dtype="float32"), method[..., None]
        distance = ops.absolute(taps - 1 - past[..., None])
        from_, end = ops.cast(found, "float32"), (start + scale)[..., None]
        covered = ops.minimum(from_ + 1, end) - ops.maximum(from_, start[..., None])
        linear = ops.maximum(1 - distance, 0)
        weights = ops.where(method == BICUBIC, cubic_weight(distance), linear)
        weights = ops.where(method == AREA, ops.maximum(covered, 0) / scale[..., None], weights)
        return ops.where(method == NEAREST, ops.cast(taps == 0, "float32"), weights)


def cubic_weight(distance: Tensor) -> Tensor:
    """The weight of a pixel at a distance of 0 to 2 (R. Keys, Cubic convolution, 1981)."""
    near = ((CUBIC_A + 2) * distance - (CUBIC_A + 3)) * distance * distance + 1
    far = ((CUBIC_A * distance - 5 * CUBIC_A) * distance + 8 * CUBIC_A) * distance - 4 * CUBIC_A
    return ops.where(distance <= 1, near, ops.where(distance < 2, far, 0.0))


def adjust_colors(levels: Tensor, parameters: KerasDistortionParameters) -> Tensor:
    """Levels [n, h, w, 3] with their colours changed, as uint8."""
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
    """Every value further from its colour's mean over the image, or nearer to it."""
    mean = ops.mean(image, axis=(1, 2), keepdims=True)
    return (image - mean) * factor + mean


def adjust_saturation_and_hue(image: Tensor, saturation: Tensor, hue_shift: Tensor) -> Tensor:
    """Saturation changed, then hue by ``turn`` of a whole, in HSV, of images [n, h, w, 3].

    As in ``torch/distortion.py``: a hue is a place on a circle of 6.
    """
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


# uint8 images [n, h, w, c], uint32 ids [n], a uint32 epoch [] to the model's input.
#
# Of photographs that the device distorts: canvases, and marks [n, 3] in place of ids
InputPreparation = Callable[[Tensor, Tensor, Tensor], Tensor]
Normalize = Callable[[Tensor], Tensor]


def build_normalizer(arrays: DataSetArrays, layout: str) -> Normalize:
    """uint8 images [n, h, w, c] to float32 ones in the layout, each channel shifted and scaled."""
    mean = np.array(arrays.mean, np.float32)
    inverse_std = np.float32(1) / np.array(arrays.std, np.float32)

    def normalize(images: Tensor) -> Tensor:
        normal = (ops.cast(images, "float32") - mean) * inverse_std
        return ops.transpose(normal, (0, 3, 1, 2)) if layout == "channels_first" else normal

    return normalize


def build_preparation(
    arrays: DataSetArrays, task: Task, operations: Operations
) -> InputPreparation:
    """Augments on the device, where the plan places it there, then normalises."""
    normalize = build_normalizer(arrays, str(task.plan.layout))
    on_device = task.plan.augment == "device"
    if on_device and task.plan.decode is not None:
        distort = KerasDistortion(arrays.train_images.shape[1], task.plan.seed)
        return lambda canvases, marks, epoch: normalize(distort(canvases, marks, epoch))
    augment = build_augmentation(operations if on_device else (), arrays, task.plan.seed)

    def prepare(images: Tensor, ids: Tensor, epoch: Tensor) -> Tensor:
        return normalize(augment(images, ids, epoch))

    return prepare
