"""Photographs as a training knows a data set: labels, classes, and what an evaluation sees."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np

from nfold.data.arrays import Array, DataSetArrays, Images
from nfold.data.distortion import center_crop
from nfold.data.part import PackedJpegs
from nfold.data.photographs import NAME, PhotographSet

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
