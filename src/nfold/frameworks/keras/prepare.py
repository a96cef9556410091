"""From stored images on the device to a model's input: augmented, normalised, in the layout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from keras import ops

from nfold.data.arrays import DataSetArrays
from nfold.frameworks.augment import Operations
from nfold.frameworks.base import Task
from nfold.frameworks.keras.augment import Tensor, build_augmentation
from nfold.frameworks.keras.distortion import KerasDistortion

InputPreparation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""uint8 images [n, h, w, c], uint32 ids [n], a uint32 epoch [] to the model's input.

Of photographs that the device distorts: canvases, and marks [n, 3] in place of ids.
"""
Normalize = Callable[[Tensor], Tensor]


def build_normalizer(arrays: DataSetArrays, layout: str) -> Normalize:
    """uint8 images [n, h, w, c] to float32 ones in the layout, each channel shifted and scaled."""
    mean = np.array(arrays.mean, np.float32)
    inverse_std = np.float32(1) / np.array(arrays.std, np.float32)

    def normalize(images: Tensor) -> Tensor:
        normal = (ops.cast(images, "float32") - mean) * inverse_std
        return ops.transpose(normal, (0, 3, 1, 2)) if layout == "channels_first" else normal

    return normalize


def build_preparation(
    arrays: DataSetArrays, task: Task, operations: Operations
) -> InputPreparation:
    """Augments on the device, where the plan places it there, then normalises."""
    normalize = build_normalizer(arrays, str(task.plan.layout))
    on_device = task.plan.augment == "device"
    if on_device and task.plan.decode is not None:
        distort = KerasDistortion(arrays.train_images.shape[1], task.plan.seed)
        return lambda canvases, marks, epoch: normalize(distort(canvases, marks, epoch))
    augment = build_augmentation(operations if on_device else (), arrays, task.plan.seed)

    def prepare(images: Tensor, ids: Tensor, epoch: Tensor) -> Tensor:
        return normalize(augment(images, ids, epoch))

    return prepare
