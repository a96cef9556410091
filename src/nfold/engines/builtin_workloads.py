"""Random crop, flip and cutout of a batch on the host, in NumPy: draws of ``torch/augment.py``.

The same pixels as there and as in ``keras/augment.py``; only the library differs.
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

OPERATION_KEYS: dict[str, int] = {"crop": 1, "flip": 2, "cutout": 3}
"""What tells the draws of operations apart. They never change: results depend on them."""

Operations = tuple[tuple[str, int], ...]
Draws = list[Words]
Augment = Callable[[Images, Ids, int], Images]
"""Images [n, h, w, c], the ids [n] of their samples and the epoch to augmented images."""


def build_augmentation(operations: Operations, arrays: DataSetArrays, seed: int) -> Augment:
    """Applies ``operations``, pairs of a name and an argument, in order; none changes nothing."""

    def augment(images: Images, ids: Ids, epoch: int) -> Images:
        for name, argument in operations:
            drawn = draws(seed, epoch, ids, OPERATION_KEYS[name])
            images = AUGMENTATIONS[name](images, drawn, argument, arrays)
        return images

    return augment


def crop(images: Images, draws: Draws, padding: int, _arrays: DataSetArrays) -> Images:
    """Pads with zeros and cuts the size out again, by draws 0 (down) and 1 (right)."""
    n, height, width, _ = images.shape
    places = 2 * padding + 1
    edge = (padding, padding)
    padded = np.pad(images, ((0, 0), edge, edge, (0, 0)))
    rows = uniform_int(draws[0], places)[:, None] + np.arange(height)
    columns = uniform_int(draws[1], places)[:, None] + np.arange(width)
    cut: Images = padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return cut


def flip(images: Images, draws: Draws, _argument: int, _arrays: DataSetArrays) -> Images:
    """Mirrors left to right by the highest bit of draw 0."""
    mirrored = (draws[0] >> np.uint64(31)).astype(bool)
    return np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)


def cutout(images: Images, draws: Draws, size: int, arrays: DataSetArrays) -> Images:
    """Covers a square with the mean, its centre at draws 0 (row) and 1 (column)."""
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
    """The training images' mean per channel, to the nearest of 256 levels."""
    return np.array([round(level) for level in arrays.mean], dtype=np.uint8)


AUGMENTATIONS: dict[str, Callable[[Images, Draws, int, DataSetArrays], Images]] = {
    "crop": crop,
    "flip": flip,
    "cutout": cutout,
}


# The random boxes of Inception's distortion, and at which reduced scale they are decoded.
#
# TensorFlow's sample_distorted_bounding_box: an aspect ratio of 3/4 to 4/3, then a height such that
# the box has 5 to 100 % of the image and lies in it, then a place. What is decoded, in each
# placement, is the box at the smallest scale of 1, 1/2, 1/4, ... that loses nothing at the wanted
# size, or at which it fits into a canvas. Drawn on the host, in every framework.

BOX_KEY = 4
"""Key of the operation, beside those of ``augment``; it never changes: results depend on it."""
MIN_AREA = 0.05
ASPECT_RATIOS = 3 / 4, 4 / 3
CANVAS_SCALE = 1.7
"""A canvas's side over an image's: 512 for 299, which holds a whole photograph of ImageNet."""
CANVAS_STEP = 32
REDUCTIONS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Beyond 1, as far as the largest JPEG (65,535 pixels a side) and the smallest canvas need."""


def canvas_side(size: int) -> int:
    """Pixels of the side of the square that holds any box which is resized to ``size``."""
    return -(-round(CANVAS_SCALE * size) // CANVAS_STEP) * CANVAS_STEP


def uniform_float(draw: Words, low: float, high: float) -> npt.NDArray[np.float64]:
    """Map 32-bit draws to numbers from ``low`` to below ``high``."""
    return draw.astype(np.float64) * ((high - low) / 2**32) + low


def draw_boxes(seed: int, epoch: int, ids: Ids, sizes: Ids) -> Ids:
    """A box (top, left, height, width) for each sample: int64 [n, 4].

    ``sizes`` are the images' heights and widths, int64 [n, 2]. An image that is 15 times as wide
    as high, or more, may have no such box: then it is the whole of it.
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
    """By how much each box [n, 4] is reduced when it is decoded, a power of two: int64 [n]."""
    tall, wide = boxes[:, 2], boxes[:, 3]
    chosen = np.ones_like(tall)
    for power in REDUCTIONS:
        lossless = np.minimum(tall, wide) >= power * size
        too_large = np.maximum(tall, wide) // chosen > canvas_side(size)
        chosen = np.where(lossless | too_large, power, chosen)
    return chosen


def scale_boxes(boxes: Ids, reductions: Ids) -> Ids:
    """The boxes [n, 4] in images that are reduced by ``by`` [n], at least one pixel large."""
    smaller = boxes // reductions[:, None]
    return np.concatenate([smaller[:, :2], np.maximum(smaller[:, 2:], 1)], axis=1)


DISTORTION_KEY = 5
COLOUR_KEY = 6
"""Keys of operations, beside those of ``augment``; they never change: results depend on them."""


def load_photographs(plan: Plan, parameters: Mapping[str, int]) -> PhotographSet:
    """The photographs of a workload's parameters, as the parent has packed and checked them."""
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
    """The looks of samples ``ids`` [n] in an epoch, one by one; draws of ``torch/distortion.py``.

    Numbers are rounded to 32 bits, which a device computes with.
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
    """The boxes of some samples of a data set and what they need of its files.

    Sample i is photograph i modulo their number; ``boxes`` int64 [n, 4] are in images that are
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
        """The pixels [height, width, 3] of a sample's box, decoded."""
        file, by = int(self.file_indices[row]), int(self.reductions[row])
        top, left, tall, wide = self.boxes[row].tolist()
        return self._part.decode(file, by)[top : top + tall, left : left + wide]


class ThreadLocalDistorter(threading.local):
    """A distorter for each thread, made when it is first used there."""

    def __init__(self, size: int) -> None:
        self.distort = Distorter(size)


class ImageDistorter:
    """Decodes and distorts samples, on so many threads, or where it is called (0).

    Decoders and OpenCV let other threads run meanwhile.
    """

    def __init__(self, part: PackedJpegs, seed: int, size: int, threads: int) -> None:
        self._draw_boxes = partial(SampleBoxes, part, seed, size)
        self._seed, self._size = seed, size
        self._distorters = ThreadLocalDistorter(size)
        self._map = ThreadPoolExecutor(threads).map if threads else map

    def __call__(self, epoch: int, ids: Ids) -> Images:
        drawn = self._draw_boxes(epoch, ids)
        images = np.empty((len(ids), self._size, self._size, 3), np.uint8)

        def one(row: int, look: DistortionParameters) -> None:
            self._distorters.distort(drawn.decode_region(row), look, images[row])

        for _ in self._map(one, range(len(ids)), draw_distortions(self._seed, epoch, ids)):
            pass  # an error of a thread is raised here
        return images


class CanvasDecoder:
    """Decodes samples and lays their boxes into canvases: what is left is a device's to distort."""

    def __init__(self, part: PackedJpegs, seed: int, size: int, threads: int) -> None:
        self._draw_boxes = partial(SampleBoxes, part, seed, size)
        self._map = ThreadPoolExecutor(threads).map if threads else map
        self._side = canvas_side(size)

    def __call__(self, epoch: int, ids: Ids) -> tuple[Images, npt.NDArray[np.uint32]]:
        drawn = self._draw_boxes(epoch, ids)
        canvases = np.zeros((len(ids), self._side, self._side, 3), np.uint8)

        def one(row: int) -> None:
            region = drawn.decode_region(row)
            canvases[row, : region.shape[0], : region.shape[1]] = region

        for _ in self._map(one, range(len(ids))):
            pass  # an error of a thread is raised here
        return canvases, np.column_stack([ids, drawn.boxes[:, 2:]]).astype(np.uint32)


def load_builtin_samples(
    info: WorkloadInfo, parameters: Mapping[str, int], plan: Plan
) -> tuple[DataSetArrays, PhotographSet | None]:
    """Arrays, cut as the parameters say, and the photographs where samples are files.

    Of those the arrays have the labels and what is evaluated on.
    """
    if info.defaults.encoded:
        found = load_photographs(plan, parameters)
        return photograph_arrays(found, parameters), found
    arrays = limit_training(data.load(str(info.dataset)), parameters.get("samples", 0))
    return limit_test(arrays, parameters.get("test_samples", 0)), None


WARMUP_FRACTION = 0.2
"""The part of the steps in which the rate rises to its peak."""


def one_cycle(progress: float) -> float:
    """The part of the peak at a place between 0, the first step, and 1, the end.

    L. Smith and N. Topin, Super-Convergence (arXiv:1708.07120, 2017): linearly up, then down to
    nothing.
    """
    return (
        progress / WARMUP_FRACTION
        if progress < WARMUP_FRACTION
        else (1 - progress) / (1 - WARMUP_FRACTION)
    )
