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
from nfold.data.distortion import BRIGHTNESS, HUE, METHODS, Distorter, Look
from nfold.data.part import Part
from nfold.data.photographs import Photographs
from nfold.data.whole import kept_whole, mapped
from nfold.frameworks.boxes import boxes, canvas_side, reduced, reductions, uniform
from nfold.frameworks.philox import Ids, below, draws
from nfold.plan import Plan

LOOK = 5
COLOUR = 6
"""Keys of operations, beside those of ``augment``; they never change: results depend on them."""


def photographs_of(plan: Plan, chosen: Mapping[str, int]) -> Photographs:
    """The photographs of a workload's parameters, as the parent has packed and checked them."""
    found = photographs.load().usable(classes=chosen["classes"], skip_bad=plan.bad_images == "skip")
    train = found.train.first(chosen["samples"])
    if plan.input == "resident":
        train = kept_whole(train)
    elif plan.cache == "decoded":
        train = mapped(train)
    return dataclasses.replace(found, train=train)


def looks(seed: int, epoch: int, ids: Ids) -> list[Look]:
    """The looks of samples ``ids`` [n] in an epoch, one by one; draws of ``torch/distortion.py``.

    Numbers are rounded to 32 bits, which a device computes with.
    """
    method, mirrored, order, brightness = draws(seed, epoch, ids, LOOK)
    saturation, hue, contrast, _ = draws(seed, epoch, ids, COLOUR)
    numbers = (
        uniform(brightness, -BRIGHTNESS, BRIGHTNESS),
        uniform(saturation, 0.5, 1.5),
        uniform(hue, -HUE, HUE),
        uniform(contrast, 0.5, 1.5),
    )
    halves = [bits >> np.uint64(31) > 0 for bits in (mirrored, order)]
    rounded = [number.astype(np.float32) for number in numbers]
    columns = (below(method, len(METHODS)), *halves, *rounded)
    return [Look(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


class Drawn:
    """The boxes of some samples of a data set and what they need of its files.

    Sample i is photograph i modulo their number; ``boxes`` int64 [n, 4] are in images that are
    reduced by ``reductions`` [n].
    """

    def __init__(self, part: Part, seed: int, size: int, epoch: int, ids: Ids) -> None:
        self._part = part
        self.files = ids % len(part)
        full = boxes(seed, epoch, ids, part.sizes[self.files])
        self.reductions = reductions(full, size)
        self.boxes = reduced(full, self.reductions)

    def __len__(self) -> int:
        return len(self.files)

    def region(self, row: int) -> Images:
        """The pixels [height, width, 3] of a sample's box, decoded."""
        file, by = int(self.files[row]), int(self.reductions[row])
        top, left, tall, wide = self.boxes[row].tolist()
        return self._part.decoded(file, by)[top : top + tall, left : left + wide]


class Developed(threading.local):
    """A distorter for each thread, made when it is first used there."""

    def __init__(self, size: int) -> None:
        self.distort = Distorter(size)


class Darkroom:
    """Decodes and distorts samples, on so many threads, or where it is called (0).

    Decoders and OpenCV let other threads run meanwhile.
    """

    def __init__(self, part: Part, seed: int, size: int, threads: int) -> None:
        self._drawn = partial(Drawn, part, seed, size)
        self._seed, self._size = seed, size
        self._own = Developed(size)
        self._map = ThreadPoolExecutor(threads).map if threads else map

    def __call__(self, epoch: int, ids: Ids) -> Images:
        """Finished images [n, size, size, 3] of samples [n] in an epoch."""
        drawn = self._drawn(epoch, ids)
        images = np.empty((len(ids), self._size, self._size, 3), np.uint8)

        def one(row: int, look: Look) -> None:
            self._own.distort(drawn.region(row), look, images[row])

        for _ in self._map(one, range(len(ids)), looks(self._seed, epoch, ids)):
            pass  # an error of a thread is raised here
        return images


class Undistorted:
    """Decodes samples and lays their boxes into canvases: what is left is a device's to distort."""

    def __init__(self, part: Part, seed: int, size: int, threads: int) -> None:
        self._drawn = partial(Drawn, part, seed, size)
        self._map = ThreadPoolExecutor(threads).map if threads else map
        self._side = canvas_side(size)

    def __call__(self, epoch: int, ids: Ids) -> tuple[Images, npt.NDArray[np.uint32]]:
        """Canvases with boxes in the upper left corner, and ids, heights and widths [n, 3]."""
        drawn = self._drawn(epoch, ids)
        canvases = np.zeros((len(ids), self._side, self._side, 3), np.uint8)

        def one(row: int) -> None:
            region = drawn.region(row)
            canvases[row, : region.shape[0], : region.shape[1]] = region

        for _ in self._map(one, range(len(ids))):
            pass  # an error of a thread is raised here
        return canvases, np.column_stack([ids, drawn.boxes[:, 2:]]).astype(np.uint32)
