"""JPEGs decoded on the GPU: nvJPEG, through torchvision where it was built with CUDA.

A worker hands out files as they are; the device decodes them, cuts out the boxes and lays them in
canvases, on the stream beside the step. What nvJPEG does not know (CMYK) the host decodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nfold.data.decode import decode_with_pillow
from nfold.data.part import PackedJpegs
from nfold.errors import Unsupported
from nfold.frameworks.base import Task
from nfold.frameworks.boxes import canvas_side
from nfold.frameworks.photographs import SampleBoxes
from nfold.frameworks.torch.batch import Batch
from nfold.frameworks.torch.cutting import PackedImages, crop_to_canvases
from nfold.frameworks.torch.input import BatchKey
from nfold.frameworks.torch.photographs import build_batch, shared_tensor

DecodeJpegs = Callable[[Sequence[Tensor], torch.device], list[Tensor]]
"""JPEGs, uint8 [bytes] on the host, to images uint8 [3, h, w] on the device."""


class JpegBatches(Dataset[Batch]):
    """Whole batches of JPEGs as they are; a worker only draws their boxes and reads them."""

    def __init__(self, part: PackedJpegs, task: Task, size: int) -> None:
        self._part, self._seed, self._size = part, task.plan.seed, size

    def __getitem__(self, key: BatchKey) -> Batch:
        drawn = SampleBoxes(self._part, self._seed, self._size, key.epoch, key.ids)
        files = [self._part.jpeg(int(file)) for file in drawn.file_indices]
        lengths = torch.tensor([len(file) for file in files])
        content = shared_tensor(int(lengths.sum()))
        np.concatenate(files, out=content.numpy())
        labels = torch.from_numpy(self._part.labels[drawn.file_indices])
        drew = np.column_stack([drawn.boxes, drawn.reductions])
        boxes = torch.cat([torch.from_numpy(drew), lengths[:, None]], dim=1)
        return build_batch(key, (content, labels, torch.from_numpy(key.ids), boxes))


class NvjpegTransfer:
    """Brings a batch of files to the device, as ``Canvases`` brings one of pixels."""

    def __init__(self, size: int, decode: DecodeJpegs) -> None:
        self._side = canvas_side(size)
        self._decode = decode

    def __call__(self, batch: Batch, device: torch.device) -> Batch:
        """Tensors (images, labels, ids, places) of a batch (files, labels, ids, boxes).

        One call decodes all files, and the boxes of all images are cut out together.
        """
        content, labels, ids, boxes = batch.tensors
        files = torch.split(content, boxes[:, -1].tolist())
        images = PackedImages.pack(self._decode(files, device))
        laid = crop_to_canvases(images, boxes[:, :5], self._side)
        labels, ids, places = (
            tensor.to(device, non_blocking=True) for tensor in (labels, ids, boxes[:, 2:4])
        )
        return dataclasses.replace(batch, tensors=(laid, labels, ids, places))


def torchvision_decoder() -> DecodeJpegs:
    """torchvision's decoder; Unsupported where it is missing or was built without nvJPEG."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except (ImportError, RuntimeError) as error:
        raise Unsupported(f"torchvision cannot be imported: {error}; next: --decode cpu") from error

    def decode(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        _wait_for_freed_memory(device)
        try:
            return cast(
                list[Tensor], decode_jpeg(list(files), mode=ImageReadMode.RGB, device=device)
            )
        except RuntimeError as error:
            if "nvjpeg" in str(error).lower() and "compiled" in str(error).lower():
                raise Unsupported(
                    "torchvision was built without nvJPEG; next: --decode cpu"
                ) from error
            return [_decode_one(decode_jpeg, ImageReadMode.RGB, one, device) for one in files]

    return decode


def _wait_for_freed_memory(device: torch.device) -> None:
    """Wait until what runs on the current stream is through with memory that Python gave back.

    torchvision takes the images' memory from this stream and decodes on one of its own, which
    waits for nothing: it would write over what kernels of the batch before still read.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _decode_one(
    decode_jpeg: Callable[..., Tensor], mode: object, file: Tensor, device: torch.device
) -> Tensor:
    """One file of a batch that could not be decoded together, by the host if need be."""
    try:
        return decode_jpeg(file, mode=mode, device=device)
    except RuntimeError:
        image = decode_with_pillow(file.numpy(), 1, 1, 1)
        return torch.from_numpy(image.copy()).permute(2, 0, 1).to(device)
