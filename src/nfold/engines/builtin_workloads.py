"""Input of the built-in workloads on the host, in NumPy: augmentation, distortion, decoding.

Random crop, flip and cutout use the same draws and give the same pixels as
``engines/torch/input/preprocessing.py`` and ``engines/keras/preprocessing.py``.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt

from nfold import data
from nfold.core.plan import Plan
from nfold.data import photographs
from nfold.data.arrays import DataSetArrays, Images, limit_test, limit_training
from nfold.data.distortion import (
    BRIGHTNESS,
    HUE,
    METHODS,
    Distorter,
    DistortionParameters,
    photograph_arrays,
)
from nfold.data.packed_jpegs import PackedJpegs
from nfold.data.photographs import PhotographSet, decode_all, map_decoded
from nfold.engines.sampling import Ids, Words, draws, uniform_int
from nfold.workloads.workload_info import WorkloadInfo

# Keys of the random draws. They never change: results depend on them.
OPERATION_KEYS: dict[str, int] = {"crop": 1, "flip": 2, "cutout": 3}

Operations = tuple[tuple[str, int], ...]
Draws = list[Words]
# images [n, h, w, c], sample ids [n], epoch -> images
Augment = Callable[[Images, Ids, int], Images]


def build_augmentation(operations: Operations, arrays: DataSetArrays, seed: int) -> Augment:
    """Return a function that applies ``operations`` (name, argument) in order."""

    def augment(images: Images, ids: Ids, epoch: int) -> Images:
        for name, argument in operations:
            drawn = draws(seed, epoch, ids, OPERATION_KEYS[name])
            images = AUGMENTATIONS[name](images, drawn, argument, arrays)
        return images

    return augment


def crop(images: Images, draws: Draws, padding: int, _arrays: DataSetArrays) -> Images:
    """Pad with zeros and cut out the original size at draws 0 (down) and 1 (right)."""
    n, height, width, _ = images.shape
    positions = 2 * padding + 1
    edge = (padding, padding)
    padded = np.pad(images, ((0, 0), edge, edge, (0, 0)))
    rows = uniform_int(draws[0], positions)[:, None] + np.arange(height)
    columns = uniform_int(draws[1], positions)[:, None] + np.arange(width)
    cut: Images = padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return cut


def flip(images: Images, draws: Draws, _argument: int, _arrays: DataSetArrays) -> Images:
    """Mirror left to right by the highest bit of draw 0."""
    mirrored = (draws[0] >> np.uint64(31)).astype(bool)
    return np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)


def cutout(images: Images, draws: Draws, size: int, arrays: DataSetArrays) -> Images:
    """Cover a square with the mean; its centre is at draws 0 (row) and 1 (column)."""
    _, height, width, _ = images.shape
    square = (
        _covered_positions(draws[0], height, size)[:, :, None]
        & _covered_positions(draws[1], width, size)[:, None, :]
    )
    return np.where(square[..., None], mean_levels(arrays), images)


def _covered_positions(drawn: Words, side: int, size: int) -> npt.NDArray[np.bool_]:
    distance = np.arange(side) - (uniform_int(drawn, side) - size // 2)[:, None]
    covered: npt.NDArray[np.bool_] = (distance >= 0) & (distance < size)
    return covered


def mean_levels(arrays: DataSetArrays) -> npt.NDArray[np.uint8]:
    """Return the training images' mean per channel, rounded to 256 levels."""
    return np.array([round(level) for level in arrays.mean], dtype=np.uint8)


AUGMENTATIONS: dict[str, Callable[[Images, Draws, int, DataSetArrays], Images]] = {
    "crop": crop,
    "flip": flip,
    "cutout": cutout,
}


# The random boxes of Inception's distortion, and at which reduced scale they are decoded.
#
# TensorFlow's sample_distorted_bounding_box: an aspect ratio of 3/4 to 4/3, then a height such that
# the box has 5 to 100 % of the image and lies in it, then a position. A box is decoded at the
# smallest scale of 1, 1/2, 1/4, ... that loses no detail at the target size, or at which it fits
# into a canvas. Every framework draws boxes on the host.

BOX_KEY = 4  # key of the random draws; it never changes
MIN_AREA = 0.05
ASPECT_RATIOS = 3 / 4, 4 / 3
CANVAS_SCALE = 1.7  # side of a canvas over that of an image: 512 for 299
CANVAS_STEP = 32
# Enough for the largest JPEG (65,535 pixels a side) and the smallest canvas.
REDUCTIONS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def canvas_side(size: int) -> int:
    """Return the side, in pixels, of a square that holds any box resized to ``size``."""
    return -(-round(CANVAS_SCALE * size) // CANVAS_STEP) * CANVAS_STEP


def uniform_float(draw: Words, low: float, high: float) -> npt.NDArray[np.float64]:
    return draw.astype(np.float64) * ((high - low) / 2**32) + low


def draw_boxes(seed: int, epoch: int, ids: Ids, sizes: Ids) -> Ids:
    """Return a box (top, left, height, width) for each sample: int64 [n, 4].

    ``sizes`` are the heights and widths of the images, int64 [n, 2]. An image that is 15 times as
    wide as high, or more, may have no such box: its box is the whole image.
    """
    ratio, share, down, right = draws(seed, epoch, ids, BOX_KEY)
    height, width = sizes.T
    aspect = uniform_float(ratio, *ASPECT_RATIOS)
    highest = np.minimum(np.round(np.sqrt(height * width / aspect)), height)
    highest = np.minimum(highest, np.floor((width + 0.5 - 1e-7) / aspect))
    least = np.maximum(np.round(np.sqrt(MIN_AREA * height * width / aspect)), 1)
    possible = least <= highest
    tall = least + np.floor(uniform_float(share, 0, 1) * (highest - least + 1))
    wide = np.clip(np.round(tall * aspect), 1, width)
    tall = np.where(possible, tall.astype(np.int64), height)
    wide = np.where(possible, wide.astype(np.int64), width)
    top, left = uniform_int(down, height - tall + 1), uniform_int(right, width - wide + 1)
    return np.stack([top, left, tall, wide], axis=1)


def decode_reductions(boxes: Ids, size: int) -> Ids:
    """Return the factor, a power of two, by which each box [n, 4] is reduced: int64 [n]."""
    tall, wide = boxes[:, 2], boxes[:, 3]
    chosen = np.ones_like(tall)
    for power in REDUCTIONS:
        lossless = np.minimum(tall, wide) >= power * size
        too_large = np.maximum(tall, wide) // chosen > canvas_side(size)
        chosen = np.where(lossless | too_large, power, chosen)
    return chosen


def scale_boxes(boxes: Ids, reductions: Ids) -> Ids:
    smaller = boxes // reductions[:, None]
    return np.concatenate([smaller[:, :2], np.maximum(smaller[:, 2:], 1)], axis=1)


DISTORTION_KEY = 5
COLOUR_KEY = 6  # keys of the random draws; they never change


def load_photographs(plan: Plan, parameters: Mapping[str, int]) -> PhotographSet:
    """Return the photographs of a workload, packed and checked by the parent process."""
    found = photographs.load().validate(
        classes=parameters["classes"], skip_bad=plan.bad_images == "skip"
    )
    train = found.train.first(parameters["samples"])
    if plan.input == "resident":
        train = decode_all(train)
    elif plan.cache == "decoded":
        train = map_decoded(train)
    return dataclasses.replace(found, train=train)


def draw_distortions(seed: int, epoch: int, ids: Ids) -> list[DistortionParameters]:
    """Return the distortion parameters of samples ``ids`` [n] in an epoch.

    The draws equal those of ``engines/distortion.py``. Numbers are rounded to the 32
    bits that a device computes with.
    """
    method, mirrored, order, brightness = draws(seed, epoch, ids, DISTORTION_KEY)
    saturation, hue, contrast, _ = draws(seed, epoch, ids, COLOUR_KEY)
    numbers = (
        uniform_float(brightness, -BRIGHTNESS, BRIGHTNESS),
        uniform_float(saturation, 0.5, 1.5),
        uniform_float(hue, -HUE, HUE),
        uniform_float(contrast, 0.5, 1.5),
    )
    halves = [bits >> np.uint64(31) > 0 for bits in (mirrored, order)]
    rounded = [number.astype(np.float32) for number in numbers]
    columns = (uniform_int(method, len(METHODS)), *halves, *rounded)
    return [
        DistortionParameters(*row)
        for row in zip(*(column.tolist() for column in columns), strict=True)
    ]


class SampleBoxes:
    """The boxes of some samples, and the files that they lie in.

    Sample i is photograph i modulo their number. ``boxes`` int64 [n, 4] are in images that are
    reduced by ``reductions`` [n].
    """

    def __init__(self, part: PackedJpegs, seed: int, size: int, epoch: int, ids: Ids) -> None:
        self._part = part
        self.file_indices = ids % len(part)
        full = draw_boxes(seed, epoch, ids, part.sizes[self.file_indices])
        self.reductions = decode_reductions(full, size)
        self.boxes = scale_boxes(full, self.reductions)

    def __len__(self) -> int:
        return len(self.file_indices)

    def decode_region(self, row: int) -> Images:
        file, by = int(self.file_indices[row]), int(self.reductions[row])
        top, left, tall, wide = self.boxes[row].tolist()
        return self._part.decode(file, by)[top : top + tall, left : left + wide]


class BoxReader:
    """Reads the boxes of samples on ``threads`` threads, or in the caller's (0).

    Decoders and OpenCV release the GIL.
    """

    def __init__(self, part: PackedJpegs, seed: int, size: int, threads: int) -> None:
        self._draw_boxes = partial(SampleBoxes, part, seed, size)
        self._seed, self._size = seed, size
        self._map = ThreadPoolExecutor(threads).map if threads else map


class ImageDistorter(BoxReader):
    """Decodes and distorts samples."""

    def __init__(self, part: PackedJpegs, seed: int, size: int, threads: int) -> None:
        super().__init__(part, seed, size, threads)
        self._distorters = threading.local()

    def __call__(self, epoch: int, ids: Ids) -> Images:
        boxes = self._draw_boxes(epoch, ids)
        images = np.empty((len(ids), self._size, self._size, 3), np.uint8)

        def distort_row(row: int, parameters: DistortionParameters) -> None:
            if not hasattr(self._distorters, "distort"):
                self._distorters.distort = Distorter(self._size)
            self._distorters.distort(boxes.decode_region(row), parameters, images[row])

        for _ in self._map(distort_row, range(len(ids)), draw_distortions(self._seed, epoch, ids)):
            pass  # raises the error of a thread
        return images


class CanvasDecoder(BoxReader):
    """Decodes samples and lays their boxes into canvases, for a device to distort."""

    def __call__(self, epoch: int, ids: Ids) -> tuple[Images, npt.NDArray[np.uint32]]:
        boxes, side = self._draw_boxes(epoch, ids), canvas_side(self._size)
        canvases = np.zeros((len(ids), side, side, 3), np.uint8)

        def decode_row(row: int) -> None:
            region = boxes.decode_region(row)
            canvases[row, : region.shape[0], : region.shape[1]] = region

        for _ in self._map(decode_row, range(len(ids))):
            pass  # raises the error of a thread
        return canvases, np.column_stack([ids, boxes.boxes[:, 2:]]).astype(np.uint32)


def load_builtin_samples(
    info: WorkloadInfo, parameters: Mapping[str, int], plan: Plan
) -> tuple[DataSetArrays, PhotographSet | None]:
    """Return the arrays, cut to the workload's parameters, and the photographs or None.

    For photographs the arrays hold the labels and the test set.
    """
    if info.defaults.encoded:
        found = load_photographs(plan, parameters)
        return photograph_arrays(found, parameters), found
    arrays = limit_training(data.load(str(info.dataset)), parameters.get("samples", 0))
    return limit_test(arrays, parameters.get("test_samples", 0)), None


WARMUP_FRACTION = 0.2  # part of the steps in which the learning rate rises


def one_cycle(progress: float) -> float:
    """Return the learning rate over its peak at ``progress`` from 0 (first step) to 1 (end).

    L. Smith and N. Topin, Super-Convergence (arXiv:1708.07120, 2017): linearly up, then down to 0.
    """
    return (
        progress / WARMUP_FRACTION
        if progress < WARMUP_FRACTION
        else (1 - progress) / (1 - WARMUP_FRACTION)
    )
