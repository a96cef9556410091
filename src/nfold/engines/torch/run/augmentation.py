"""``nfold.Images`` on a device: augmentation and normalisation of the batches of a user's loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nfold.core.errors import UsageError
from nfold.core.image_augmentation import MAX_CHANNELS, Images
from nfold.core.plan import Plan
from nfold.data.arrays import DataSetArrays
from nfold.engines.torch.input.preprocessing import Normalizer, build_augmentation
from nfold.engines.torch.run.datasets import AugmentBatch
from nfold.engines.torch.step.cuda_graph import CapturedFunction, CudaGraphRecorder
from nfold.engines.torch.step.training_step import EpochTensor

MAX_LEVEL = 255.0
# uint8 images, sample ids [n], epoch int64 [] -> float [n, c, h, w]
PrepareImages = Callable[[Tensor, Tensor, Tensor], Tensor]


# ``augment`` of a user: a function of a batch, or ``nfold.Images``
AugmentOption = Callable[[Any], Any] | Images


def build_augment(
    augment: AugmentOption | None, plan: Plan, device: torch.device
) -> AugmentBatch | None:
    if isinstance(augment, Images):
        return ImageAugmentation(augment, plan, device)
    return None if augment is None else lambda batch, *_: augment(batch)


class ImageAugmentation:
    """Applies ``Images`` to batches of any structure; built for the image shape of a batch.

    The draws alone are 145 small kernels: the plan's ``step`` compiles or captures them.
    """

    def __init__(self, images: Images, plan: Plan, device: torch.device) -> None:
        self._images, self._plan, self._device = images, plan, device
        self._prepared: dict[tuple[int, ...], PrepareImages] = {}
        self._epoch_tensor = EpochTensor(device)

    def __call__(self, batch: Any, ids: Tensor, epoch: int) -> Any:
        images, with_images = _split_first_tensor(batch)
        image_format = _image_format(images)
        if image_format not in self._prepared:
            self._prepared[image_format] = self._build(image_format)
        prepare = self._prepared[image_format]
        return with_images(prepare(images, ids.to(self._device), self._epoch_tensor(epoch)))

    def _build(self, image_format: tuple[int, int, int, int]) -> PrepareImages:
        height, width, channels, axis = image_format
        arrays = self._arrays((0, height, width, channels))
        augment = build_augmentation(self._images.operations, arrays, self._plan.seed, self._device)
        layout = self._plan.layout or "channels_first"
        normalise = Normalizer(arrays, layout, self._device)

        def prepare(images: Tensor, ids: Tensor, epoch: Tensor) -> Tensor:
            channels_last = images if axis == 3 else images.permute(0, 2, 3, 1)
            return normalise(augment(channels_last, ids, epoch))

        step = self._plan.step or ""
        function = torch.compile(prepare, dynamic=False) if "compiled" in step else prepare
        if "captured" in step and self._device.type == "cuda":
            captured = CapturedFunction(function, CudaGraphRecorder(self._device))
            return lambda *tensors: captured(tensors)
        return function

    def _arrays(self, shape: tuple[int, int, int, int]) -> DataSetArrays:
        channels = shape[3]
        mean, std = self._images.mean or (0.0,) * channels, self._images.std or (1.0,) * channels
        if len(mean) != channels:
            raise UsageError(
                f"nfold.Images has a mean of {len(mean)} numbers for images of {channels} channels; "
                "allowed is one number per channel"
            )
        no_images, labels = np.empty(shape, dtype=np.uint8), np.empty(0, dtype=np.int64)
        return DataSetArrays(
            name="images",
            classes=0,
            train_images=no_images,
            train_labels=labels,
            test_images=no_images,
            test_labels=labels,
            mean=tuple(MAX_LEVEL * value for value in mean),
            std=tuple(MAX_LEVEL * value for value in std),
        )


def _split_first_tensor(batch: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    if isinstance(batch, Tensor):
        return batch, lambda images: images
    if type(batch) in (list, tuple) and batch and isinstance(batch[0], Tensor):
        return batch[0], lambda images: type(batch)((images, *batch[1:]))
    if type(batch) is dict and batch:
        name, first = next(iter(batch.items()))
        if isinstance(first, Tensor):
            return first, lambda images: {**batch, name: images}
    raise UsageError(
        f"nfold.Images got a batch of type {type(batch).__name__}; allowed are a tensor, and a "
        "tuple, list or dictionary that begins with one; next: augment=your_function"
    )


def _image_format(images: Tensor) -> tuple[int, int, int, int]:
    shape = tuple(images.shape)
    if images.dtype == torch.uint8 and len(shape) == 4:
        if shape[3] <= MAX_CHANNELS:
            return shape[1], shape[2], shape[3], 3
        if shape[1] <= MAX_CHANNELS:
            return shape[2], shape[3], shape[1], 1
    raise UsageError(
        f"nfold.Images got {images.dtype} {list(shape)}: allowed are uint8 images [n, h, w, c] or "
        f"[n, c, h, w] of 1 to {MAX_CHANNELS} channels; next: remove ToTensor and Normalize"
    )
