"""Inception's distortion of a batch on a device, each sample by its own draws.

The arithmetic is that of ``nfold.data.distortion`` for one image on the CPU; results differ by
rounding (docs/decisions/input-pipeline.md). Nothing waits for the host and no shape depends on a
draw: it can be captured in a CUDA graph, and compiles to a few kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nfold.data.distortion import AREA, BICUBIC, BRIGHTNESS, HUE, METHODS, NEAREST
from nfold.engines.builtin_workloads import COLOUR_KEY, DISTORTION_KEY
from nfold.engines.torch.batch import CanvasTensors
from nfold.engines.torch.input.preprocessing import draws, uniform_int

TAPS = 4  # pixels per side that one resized pixel depends on: four for bicubic
CUBIC_COEFFICIENT = -0.75


def uniform_float(draw: Tensor, low: float, high: float) -> Tensor:
    """Map 32-bit draws to numbers from ``low`` to below ``high``, float64."""
    return draw.double() * ((high - low) / 2**32) + low


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


def draw_distortions(seed: int, epoch: int | Tensor, ids: Tensor) -> DistortionParameterBatch:
    """Return the distortion parameters of samples ``ids`` [n] in an epoch."""
    method, mirrored, order, brightness = draws(seed, epoch, ids, DISTORTION_KEY)
    saturation, hue, contrast, _ = draws(seed, epoch, ids, COLOUR_KEY)
    return DistortionParameterBatch(
        method=uniform_int(method, len(METHODS)),
        mirrored=mirrored >> 31,
        contrast_second=order >> 31,
        brightness=uniform_float(brightness, -BRIGHTNESS, BRIGHTNESS).float(),
        saturation=uniform_float(saturation, 0.5, 1.5).float(),
        hue=uniform_float(hue, -HUE, HUE).float(),
        contrast=uniform_float(contrast, 0.5, 1.5).float(),
    )


class DeviceDistortion:
    """Distorts the images of canvases: CanvasTensors and epoch to uint8 [n, size, size, 3]."""

    def __init__(self, size: int, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._pixels = torch.arange(size, device=device)
        self._taps = torch.arange(TAPS, device=device)

    def __call__(self, samples: CanvasTensors, epoch: Tensor) -> Tensor:
        with torch.autocast(samples.images.device.type, enabled=False):
            parameters = draw_distortions(self._seed, epoch, samples.ids)
            resized = self._resize(samples.images, samples.sizes, parameters)
            return adjust_colours(resized, parameters)

    def _resize(
        self, canvases: Tensor, sizes: Tensor, parameters: DistortionParameterBatch
    ) -> Tensor:
        """Whole levels as float [n, size, size, 3].

        Resizes rows, transposes, and resizes the columns as rows: a row is contiguous.
        """
        method, mirrored = parameters.method, parameters.mirrored
        resized_rows = weighted_rows(canvases, *self._weights(sizes[:, 0], method, None))
        transposed = resized_rows.transpose(1, 2).contiguous()
        image = weighted_rows(transposed, *self._weights(sizes[:, 1], method, mirrored))
        return (image.transpose(1, 2) + 0.5).clamp(0, 255).floor()

    def _weights(
        self, sides: Tensor, method: Tensor, mirrored: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        size = len(self._pixels)
        pixels = self._pixels.expand(len(sides), size)
        if mirrored is not None:
            pixels = torch.where(mirrored[:, None] > 0, size - 1 - pixels, pixels)
        sides, method = sides[:, None], method[:, None]
        scale = sides.float() / size
        middle = (pixels + 0.5) * scale - 0.5
        below_middle = middle.floor()
        start = pixels * scale
        nearest = (2 * pixels + 1) * sides // (2 * size)
        first = torch.where(method == AREA, start.floor().long(), below_middle.long() - 1)
        first = torch.where(method == NEAREST, nearest, first)
        taps = first[..., None] + self._taps
        weights = self._tap_weights(taps, middle - below_middle, start, scale, method)
        return taps.clamp(min=0).minimum(sides[..., None] - 1), weights

    def _tap_weights(
        self, taps: Tensor, fraction: Tensor, start: Tensor, scale: Tensor, method: Tensor
    ) -> Tensor:
        """The weights [n, size, 4] of each sample's own method.

        ``fraction`` is the distance of a pixel's centre from the second tap's, 0 to 1.
        """
        distance = (self._taps - 1 - fraction[..., None]).abs()
        end = (start + scale)[..., None]
        covered = (taps + 1).minimum(end) - taps.maximum(start[..., None])
        method = method[..., None]
        weights = torch.where(
            method == BICUBIC, cubic_weight(distance), (1 - distance).clamp(min=0)
        )
        weights = torch.where(method == AREA, covered.clamp(min=0) / scale[..., None], weights)
        return torch.where(method == NEAREST, (self._taps == 0).float(), weights)


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


def cubic_weight(distance: Tensor) -> Tensor:
    """Return the weight of a pixel at a distance of 0 to 2 (R. Keys, Cubic convolution, 1981)."""
    near = ((CUBIC_COEFFICIENT + 2) * distance - (CUBIC_COEFFICIENT + 3)) * distance * distance + 1
    far = (
        (CUBIC_COEFFICIENT * distance - 5 * CUBIC_COEFFICIENT) * distance + 8 * CUBIC_COEFFICIENT
    ) * distance - 4 * CUBIC_COEFFICIENT
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, 0))


def adjust_colours(levels: Tensor, draws: DistortionParameterBatch) -> Tensor:
    """Change the colours of levels [n, h, w, 3]; returns uint8."""
    image = levels / 255 + draws.brightness[:, None, None, None]
    second = draws.contrast_second[:, None, None, None] > 0
    factor = draws.contrast[:, None, None, None]
    image = adjust_contrast(image, torch.where(second, factor, 1))
    image = adjust_saturation_and_hue(
        image.clamp(min=0), draws.saturation[:, None, None], draws.hue[:, None, None]
    )
    image = adjust_contrast(image, torch.where(second, 1, factor))
    return (image * 255 + 0.5).clamp(0, 255).to(torch.uint8)


def adjust_contrast(image: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance of every value from its colour's mean over the image."""
    mean = image.mean(dim=(1, 2), keepdim=True)
    return (image - mean) * factor + mean


def adjust_saturation_and_hue(image: Tensor, saturation: Tensor, hue_shift: Tensor) -> Tensor:
    """Scale the saturation and shift the hue, in HSV, of images [n, h, w, 3].

    Chroma grows with saturation up to the value, which stays. A hue is a position on a circle of
    6: red at 0, green at 2, blue at 4 (A. Smith, Color gamut transform pairs, 1978).
    """
    red, green, blue = image.unbind(-1)
    value = image.amax(-1)
    chroma = value - image.amin(-1)
    inverse = 1 / chroma.clamp(min=1e-12)
    hue = torch.where(green == value, (blue - red) * inverse + 2, (red - green) * inverse + 4)
    hue = torch.where(red == value, (green - blue) * inverse, hue)
    hue = (hue + 6 * hue_shift).remainder(6)
    chroma = (chroma * saturation).minimum(value)
    shares = ((hue - 3).abs() - 1, 2 - (hue - 2).abs(), 2 - (hue - 4).abs())
    return torch.stack([value - chroma * (1 - part.clamp(0, 1)) for part in shares], dim=-1)
