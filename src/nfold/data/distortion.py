"""The distortion that Inception was published with, of one image on the CPU.

Google's training code of 2016 (image_processing.py): the box is resized by one of four methods
without smoothing first, mirrored or not, and brightness, saturation, hue and contrast are changed
in one of two orders, on a scale of 0 to 1 that is cut off at the end, and below 0 before saturation
(there the original leaves open what negative colours become). Pixel centres are at halves;
bicubic has a = -0.75, as OpenCV's. Bytes lie between resizing and colour, and at the end.
``frameworks/torch/distortion.py`` computes the same on a device.
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
    cv2.setNumThreads(1)  # workers are processes, one a core; its threads would only be in the way

METHODS = ("bilinear", "nearest", "bicubic", "area")
BILINEAR, NEAREST, BICUBIC, AREA = range(len(METHODS))
BRIGHTNESS = 32 / 255
HUE = 0.2
"""How far brightness and hue go, up and down."""
CENTER_FRACTION = 0.875
"""The middle part of both sides that an evaluation sees."""


@dataclass(frozen=True)
class DistortionParameters:
    """What one sample drew besides its box.

    ``hue`` is added in turns of the circle, ``brightness`` on the scale of 0 to 1; the other two
    are factors. The order is brightness, saturation, hue, contrast, or with ``contrast_second``
    brightness, contrast, saturation, hue.
    """

    method: int
    mirrored: bool
    contrast_second: bool
    brightness: float
    saturation: float
    hue: float
    contrast: float


class Distorter:
    """Distorts images one after the other to ``size``; keeps its memory, so use one a thread.

    Two megabytes that are taken and given back for every image cost twice the computation.
    """

    def __init__(self, size: int) -> None:
        if cv2 is None:
            raise ExtraMissing("OpenCV", "images")
        self._size = size
        self._buffer_1, self._buffer_2 = np.empty((2, size, size, 3), np.float32)

    def __call__(self, region: Images, look: DistortionParameters, into: Images) -> None:
        image = resize(region, self._size, look.method)
        self.adjust_colors(cv2.flip(image, 1) if look.mirrored else image, look, into)

    def adjust_colors(self, image: Images, look: DistortionParameters, into: Images) -> None:
        """The image with its brightness, saturation, hue and contrast changed."""
        one, other = self._buffer_1, self._buffer_2
        first, last = (look.contrast, 1.0) if look.contrast_second else (1.0, look.contrast)
        cv2.LUT(image, _brightness_table(image, look.brightness, first), dst=one)
        cv2.cvtColor(one, cv2.COLOR_RGB2HSV, dst=other)
        cv2.transform(other, _hsv_transform(look, 255 * last), dst=one)
        np.minimum(one[..., 1], 1, out=one[..., 1])
        cv2.cvtColor(one, cv2.COLOR_HSV2RGB, dst=other)
        offsets = tuple(mean * (1 - last) / last for mean in cv2.mean(other))
        cv2.add(other, offsets, dst=into, dtype=cv2.CV_8U)


def _hsv_transform(look: DistortionParameters, scale: float) -> npt.NDArray[np.float32]:
    """The change of hue (in degrees), saturation and value, [3, 4].

    Scaling the value scales all three colours: contrast and 255 levels come for nothing here.
    """
    turned = [1, 0, 0, 360 * (look.hue % 1)]
    return np.array([turned, [0, look.saturation, 0, 0], [0, 0, scale, 0]], np.float32)


def center_crop(image: Images, size: int) -> Images:
    """The middle of a decoded image, resized bilinearly: what an evaluation sees."""
    height, width = image.shape[:2]
    top, left = (round(side * (1 - CENTER_FRACTION) / 2) for side in (height, width))
    return resize(image[top : height - top, left : width - left], size, BILINEAR)


def resize(region: Images, size: int, method: int) -> Images:
    """A region as [size, size, 3] by one of METHODS."""
    if cv2 is None:
        raise ExtraMissing("OpenCV", "images")
    if method == NEAREST:
        return _resize_nearest(region, size)
    if method == AREA:
        return _resize_area(region, size)
    known = cv2.INTER_LINEAR if method == BILINEAR else cv2.INTER_CUBIC
    return _resize_cv2(region, (size, size), known)


def nearest_pixels(side: int, size: int) -> npt.NDArray[np.int64]:
    """For every pixel the nearest one of ``side``, by its centre, in whole numbers."""
    return (2 * np.arange(size) + 1) * side // (2 * size)


def _resize_nearest(region: Images, size: int) -> Images:
    places = np.empty((size, size, 2), np.int16)
    places[..., 0] = nearest_pixels(region.shape[1], size)
    places[..., 1] = nearest_pixels(region.shape[0], size)[:, None]
    image: Images = cv2.remap(region, places, None, cv2.INTER_NEAREST)
    return image


def _resize_area(region: Images, size: int) -> Images:
    """Means over what each pixel covers.

    OpenCV's INTER_AREA is that where both sides shrink or both grow; else one side at a time.
    """
    height, width = region.shape[:2]
    if (height >= size) != (width >= size):
        region = _resize_cv2(region, (size, height), cv2.INTER_AREA)
    return _resize_cv2(region, (size, size), cv2.INTER_AREA)


def _resize_cv2(region: Images, width_height: tuple[int, int], method: int) -> Images:
    image: Images = cv2.resize(region, width_height, interpolation=method)
    return image


def _brightness_table(image: Images, by: float, contrast: float) -> npt.NDArray[np.float32]:
    means = np.array(cv2.mean(image)[:3]) / 255 + by
    levels = np.arange(256)[:, None, None] / 255 + by
    return np.maximum((levels - means) * contrast + means, 0).astype(np.float32)


HALF_LEVEL = 127.5
"""Half of the levels: what is taken off and divided by, so that a model sees -1 to 1."""


def photograph_arrays(photographs: PhotographSet, parameters: Mapping[str, int]) -> DataSetArrays:
    """Labels and what is evaluated on, by the workload's parameters; no training image is in it.

    Training has every photograph ``repeat`` times: sample i is photograph i modulo their number.
    """
    size, test = parameters["size"], photographs.test
    none = np.empty((0, size, size, 3), np.uint8)
    labels = photographs.train.first(parameters["samples"]).labels
    return DataSetArrays(
        name=NAME,
        classes=parameters["classes"],
        train_images=none,
        train_labels=np.tile(labels, parameters["repeat"]),
        test_images=none if test is None else cast(Array, CenterCrops(test, size)),
        test_labels=np.empty(0, np.int64) if test is None else test.labels,
        mean=(HALF_LEVEL,) * 3,
        std=(HALF_LEVEL,) * 3,
    )


class CenterCrops:
    """The middles of photographs, decoded when they are asked for: a slice is [n, size, size, 3].

    Decoded by as many threads as this process has cores; both libraries let others run meanwhile.
    """

    def __init__(self, part: PackedJpegs, size: int) -> None:
        self._part, self._size = part, size

    def __getitem__(self, chosen: slice) -> Images:
        rows = range(*chosen.indices(len(self._part)))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            return np.stack(list(threads.map(self._one, rows)))

    def _one(self, row: int) -> Images:
        return center_crop(self._part.decode(row), self._size)
