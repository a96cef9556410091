"""Inception's distortion fused into the step: draws and pixels of ``torch/distortion.py``.

A resized image is a product of matrices here: which pixels a pixel sees is a row of weights, most
of them 0. Products keep the batch's axis, along which it is split over devices, and take about 2 %
of what the network does at 299. In 32 bits, as JAX computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keras import ops

from nfold.data.distortion import AREA, BICUBIC, BRIGHTNESS, HUE, METHODS, NEAREST
from nfold.frameworks.keras.augment import Tensor, draw_uint32, random_below
from nfold.frameworks.photographs import COLOUR_KEY, DISTORTION_KEY

TAPS = 4
"""Pixels that one pixel of a resized image may see of each side: four for bicubic."""
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
        """What each pixel takes of every place of a canvas's side: float32 [n, size, canvas]."""
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
        """Which pixels of ``sides`` [n] each pixel sees, int32 [n, size, 4], and their weights."""
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
