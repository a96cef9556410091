"""Inception's published training distortion, for one image on the CPU.

As in Google's training code of 2016 (image_processing.py): resizes the box by one of four methods
without antialiasing, flips it or not, then changes brightness, saturation, hue and contrast in one
of two orders. Colours are clipped to 0 to 1 at the end, and negative colours to 0 before the
saturation (undefined in the original). Pixel centres are at halves; bicubic uses a = -0.75, as
OpenCV does. Values are rounded to bytes after resizing and at the end.
``engines/distortion.py`` computes the same on a device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from nfold.core.errors import ExtraMissing
from nfold.data.arrays import Array, DataSetArrays, Images
from nfold.data.packed_jpegs import PackedJpegs
from nfold.data.photographs import NAME, PhotographSet

cv2: Any
try:
    import cv2
except ImportError:
    cv2 = None
else:
    cv2.setNumThreads(1)  # each core has a worker process already

METHODS = ("bilinear", "nearest", "bicubic", "area")
BILINEAR, NEAREST, BICUBIC, AREA = range(len(METHODS))
BRIGHTNESS = 32 / 255
HUE = 0.2
CENTER_FRACTION = 0.875  # of both sides, for evaluation


@dataclass(frozen=True)
class DistortionParameters:
    """The random parameters of one sample, except its box.

    ``hue`` is added, as a fraction of the colour circle; ``brightness`` is added on the scale 0 to
    1; ``saturation`` and ``contrast`` are factors. Contrast is changed last, or with
    ``contrast_second`` between brightness and saturation.
    """

    method: int
    mirrored: bool
    contrast_second: bool
    brightness: float
    saturation: float
    hue: float
    contrast: float


class Distorter:
    """Distorts images to ``size`` × ``size``. Reuses its buffers: not thread-safe."""

    def __init__(self, size: int) -> None:
        if cv2 is None:
            raise ExtraMissing("OpenCV", "images")
        self._size = size
        self._buffer_1, self._buffer_2 = np.empty((2, size, size, 3), np.float32)

    def __call__(self, region: Images, parameters: DistortionParameters, into: Images) -> None:
        image = resize(region, self._size, parameters.method)
        self.adjust_colors(cv2.flip(image, 1) if parameters.mirrored else image, parameters, into)

    def adjust_colors(self, image: Images, parameters: DistortionParameters, into: Images) -> None:
        """Change brightness, saturation, hue and contrast of ``image``."""
        buffer_1, buffer_2 = self._buffer_1, self._buffer_2
        first, last = 1.0, parameters.contrast
        if parameters.contrast_second:
            first, last = last, first
        cv2.LUT(image, _brightness_table(image, parameters.brightness, first), dst=buffer_1)
        cv2.cvtColor(buffer_1, cv2.COLOR_RGB2HSV, dst=buffer_2)
        # Hue is in degrees. Scaling the value scales all colours: by the contrast and to 255.
        hsv_transform = np.array(
            [
                [1, 0, 0, 360 * (parameters.hue % 1)],
                [0, parameters.saturation, 0, 0],
                [0, 0, 255 * last, 0],
            ],
            np.float32,
        )
        cv2.transform(buffer_2, hsv_transform, dst=buffer_1)
        np.minimum(buffer_1[..., 1], 1, out=buffer_1[..., 1])
        cv2.cvtColor(buffer_1, cv2.COLOR_HSV2RGB, dst=buffer_2)
        offsets = tuple(mean * (1 - last) / last for mean in cv2.mean(buffer_2))
        cv2.add(buffer_2, offsets, dst=into, dtype=cv2.CV_8U)


def center_crop(image: Images, size: int) -> Images:
    """Crop the middle of a decoded image for evaluation and resize it bilinearly."""
    height, width = image.shape[:2]
    top, left = (round(side * (1 - CENTER_FRACTION) / 2) for side in (height, width))
    return resize(image[top : height - top, left : width - left], size, BILINEAR)


def resize(region: Images, size: int, method: int) -> Images:
    """Resize a region to [size, size, 3] by one of METHODS."""
    if cv2 is None:
        raise ExtraMissing("OpenCV", "images")
    height, width = region.shape[:2]
    if method == NEAREST:
        pixels = np.empty((size, size, 2), np.int16)
        pixels[..., 0] = nearest_pixels(width, size)
        pixels[..., 1] = nearest_pixels(height, size)[:, None]
        image: Images = cv2.remap(region, pixels, None, cv2.INTER_NEAREST)
        return image
    interpolations = {
        BILINEAR: cv2.INTER_LINEAR,
        BICUBIC: cv2.INTER_CUBIC,
        AREA: cv2.INTER_AREA,
    }
    interpolation = interpolations[method]
    if method == AREA and (height >= size) != (width >= size):
        # INTER_AREA averages only if both sides shrink or both grow: one side at a time.
        region = cv2.resize(region, (size, height), interpolation=interpolation)
    resized: Images = cv2.resize(region, (size, size), interpolation=interpolation)
    return resized


def nearest_pixels(side: int, size: int) -> npt.NDArray[np.int64]:
    """Return for each of ``size`` pixels the nearest of ``side`` pixels, by pixel centres."""
    return (2 * np.arange(size) + 1) * side // (2 * size)


def _brightness_table(image: Images, offset: float, contrast: float) -> npt.NDArray[np.float32]:
    means = np.array(cv2.mean(image)[:3]) / 255 + offset
    levels = np.arange(256)[:, None, None] / 255 + offset
    return np.maximum((levels - means) * contrast + means, 0).astype(np.float32)


HALF_LEVEL = 127.5  # mean and std: the model's input is -1 to 1


def photograph_arrays(photographs: PhotographSet, parameters: Mapping[str, int]) -> DataSetArrays:
    """Return labels and test images for the workload's parameters, without training images.

    Training repeats every photograph ``repeat`` times: sample i is photograph i modulo their count.
    """
    size, test = parameters["size"], photographs.test
    no_images = np.empty((0, size, size, 3), np.uint8)
    labels = photographs.train.first(parameters["samples"]).labels
    return DataSetArrays(
        name=NAME,
        classes=parameters["classes"],
        train_images=no_images,
        train_labels=np.tile(labels, parameters["repeat"]),
        test_images=no_images if test is None else cast(Array, CenterCrops(test, size)),
        test_labels=np.empty(0, np.int64) if test is None else test.labels,
        mean=(HALF_LEVEL,) * 3,
        std=(HALF_LEVEL,) * 3,
    )


class CenterCrops:
    """Centre crops of photographs, decoded on access by one thread per core.

    A slice is [n, size, size, 3].
    """

    def __init__(self, part: PackedJpegs, size: int) -> None:
        self._part, self._size = part, size

    def __getitem__(self, chosen: slice) -> Images:
        rows = range(*chosen.indices(len(self._part)))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            return np.stack(
                list(threads.map(lambda row: center_crop(self._part.decode(row), self._size), rows))
            )
