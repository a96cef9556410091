"""What the host does of decoding and distorting photographs, the same in every framework."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt

from nfold.data import photographs
from nfold.data.arrays import Images
from nfold.data.distortion import BRIGHTNESS, HUE, METHODS, Distorter, DistortionParameters
from nfold.data.part import PackedJpegs
from nfold.data.photographs import PhotographSet
from nfold.data.whole import decode_all, map_decoded
from nfold.frameworks.boxes import (
    canvas_side,
    decode_reductions,
    draw_boxes,
    scale_boxes,
    uniform_float,
)
from nfold.frameworks.philox import Ids, draws, uniform_int
from nfold.plan import Plan

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
        """Finished images [n, size, size, 3] of samples [n] in an epoch."""
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
        """Canvases with boxes in the upper left corner, and ids, heights and widths [n, 3]."""
        drawn = self._draw_boxes(epoch, ids)
        canvases = np.zeros((len(ids), self._side, self._side, 3), np.uint8)

        def one(row: int) -> None:
            region = drawn.decode_region(row)
            canvases[row, : region.shape[0], : region.shape[1]] = region

        for _ in self._map(one, range(len(ids))):
            pass  # an error of a thread is raised here
        return canvases, np.column_stack([ids, drawn.boxes[:, 2:]]).astype(np.uint32)
