"""Inception's distortion of a batch on a device, each sample by its own draws, in any framework.

The arithmetic is that of ``nfold.data.distortion`` for one image on the CPU; results differ by
rounding (docs/decisions/input-pipeline.md). Nothing waits for the host and no shape depends on a
draw: it can be captured in a CUDA graph, and compiles to a few kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from nfold.data.distortion import AREA, BICUBIC, BRIGHTNESS, HUE, METHODS, NEAREST
from nfold.engines.builtin_workloads import COLOUR_KEY, DISTORTION_KEY

TAPS = 4  # pixels per side that one resized pixel depends on: four for bicubic
CUBIC_COEFFICIENT = -0.75

Tensor = Any  # of the framework


@dataclass(frozen=True)
class DistortionParameterBatch:
    """The fields [n] of ``nfold.data.distortion.DistortionParameters`` for n samples."""

    method: Tensor
    mirrored: Tensor
    contrast_second: Tensor
    brightness: Tensor
    saturation: Tensor
    hue: Tensor
    contrast: Tensor


class BatchDistortion(ABC):
    """Draws, resizes and changes colours; ``ops`` has the functions of ``keras.ops``."""

    ops: Any

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed

    @abstractmethod
    def draws(self, epoch: Any, ids: Tensor, operation: int) -> list[Tensor]:
        """Return four independent 32-bit draws per sample id [n]."""

    @abstractmethod
    def random_below(self, draw: Tensor, limit: int) -> Tensor: ...

    @abstractmethod
    def uniform(self, draw: Tensor, low: float, high: float) -> Tensor:
        """Map 32-bit draws to numbers from ``low`` to below ``high``, float32."""

    @abstractmethod
    def highest_bit(self, draw: Tensor) -> Tensor: ...

    def parameters(self, epoch: Any, ids: Tensor) -> DistortionParameterBatch:
        """Return the distortion parameters of samples ``ids`` [n] in an epoch."""
        method, mirrored, order, brightness = self.draws(epoch, ids, DISTORTION_KEY)
        saturation, hue, contrast, _ = self.draws(epoch, ids, COLOUR_KEY)
        return DistortionParameterBatch(
            method=self.random_below(method, len(METHODS)),
            mirrored=self.highest_bit(mirrored),
            contrast_second=self.highest_bit(order),
            brightness=self.uniform(brightness, -BRIGHTNESS, BRIGHTNESS),
            saturation=self.uniform(saturation, 0.5, 1.5),
            hue=self.uniform(hue, -HUE, HUE),
            contrast=self.uniform(contrast, 0.5, 1.5),
        )

    def source_pixels(
        self, pixels: Tensor, taps: Tensor, sides: Tensor, method: Tensor, mirrored: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the source pixels of a side of each image, and their weights: [n, size, TAPS].

        ``pixels`` [size] and ``taps`` [TAPS] count from 0.
        """
        ops, size = self.ops, self._size
        pixels = pixels[None]
        if mirrored is not None:
            pixels = ops.where(mirrored[:, None], size - 1 - pixels, pixels)
        sides, method = sides[:, None], method[:, None]
        scale = ops.cast(sides, "float32") / size
        place = ops.cast(pixels, "float32")
        middle, start = (place + 0.5) * scale - 0.5, place * scale
        below_middle = ops.floor(middle)
        nearest = (2 * pixels + 1) * sides // (2 * size)
        whole = ops.where(method == AREA, ops.floor(start), below_middle - 1)
        first = ops.where(method == NEAREST, nearest, ops.cast(whole, "int32"))
        sources = first[..., None] + taps
        weights = self._tap_weights(sources, taps, middle - below_middle, start, scale, method)
        return ops.minimum(ops.maximum(sources, 0), sides[..., None] - 1), weights

    def _tap_weights(
        self,
        sources: Tensor,
        taps: Tensor,
        fraction: Tensor,
        start: Tensor,
        scale: Tensor,
        method: Tensor,
    ) -> Tensor:
        """The weights [n, size, TAPS] of each sample's own method.

        ``fraction`` is the distance of a pixel's centre from the second tap's, 0 to 1.
        """
        ops, taps, method = self.ops, self.ops.cast(taps, "float32"), method[..., None]
        distance = ops.absolute(taps - 1 - fraction[..., None])
        begin, end = ops.cast(sources, "float32"), (start + scale)[..., None]
        covered = ops.minimum(begin + 1, end) - ops.maximum(begin, start[..., None])
        linear = ops.maximum(1 - distance, 0)
        weights = ops.where(method == BICUBIC, self.cubic_weight(distance), linear)
        weights = ops.where(method == AREA, ops.maximum(covered, 0) / scale[..., None], weights)
        return ops.where(method == NEAREST, ops.cast(taps == 0, "float32"), weights)

    def cubic_weight(self, distance: Tensor) -> Tensor:
        """Return the weight of a pixel at a distance of 0 to 2 (R. Keys, Cubic convolution, 1981)."""
        a, where = CUBIC_COEFFICIENT, self.ops.where
        near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        return where(distance <= 1, near, where(distance < 2, far, 0.0))

    def adjust_colours(self, levels: Tensor, parameters: DistortionParameterBatch) -> Tensor:
        """Change the colours of levels [n, h, w, 3], 0 to 255; returns uint8."""
        ops = self.ops
        image = levels / 255 + parameters.brightness[:, None, None, None]
        second = parameters.contrast_second[:, None, None, None]
        factor = parameters.contrast[:, None, None, None]
        image = self._adjust_contrast(image, ops.where(second, factor, 1.0))
        image = self._adjust_saturation_and_hue(
            ops.maximum(image, 0),
            parameters.saturation[:, None, None],
            parameters.hue[:, None, None],
        )
        image = self._adjust_contrast(image, ops.where(second, 1.0, factor))
        return ops.cast(ops.clip(image * 255 + 0.5, 0, 255), "uint8")

    def _adjust_contrast(self, image: Tensor, factor: Tensor) -> Tensor:
        mean = self.ops.mean(image, axis=(1, 2), keepdims=True)
        return (image - mean) * factor + mean

    def _adjust_saturation_and_hue(
        self, image: Tensor, saturation: Tensor, hue_shift: Tensor
    ) -> Tensor:
        """Scale the saturation and shift the hue, in HSV, of images [n, h, w, 3].

        Chroma grows with saturation up to the value, which stays. A hue is a position on a circle
        of 6: red at 0, green at 2, blue at 4 (A. Smith, Color gamut transform pairs, 1978).
        """
        ops = self.ops
        red, green, blue = image[..., 0], image[..., 1], image[..., 2]
        value = ops.max(image, axis=-1)
        chroma = value - ops.min(image, axis=-1)
        inverse = 1 / ops.maximum(chroma, 1e-12)
        hue = ops.where(green == value, (blue - red) * inverse + 2, (red - green) * inverse + 4)
        hue = ops.where(red == value, (green - blue) * inverse, hue)
        hue = ops.mod(hue + 6 * hue_shift, 6)
        chroma = ops.minimum(chroma * saturation, value)
        shares = (
            ops.absolute(hue - 3) - 1,
            2 - ops.absolute(hue - 2),
            2 - ops.absolute(hue - 4),
        )
        return ops.stack([value - chroma * (1 - ops.clip(part, 0, 1)) for part in shares], axis=-1)
