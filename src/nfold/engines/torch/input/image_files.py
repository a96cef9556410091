"""Batches of photographs: from JPEG files to canvases on the device.

With everything on the CPU a loader's worker distorts images. With ``augment`` on the device a
worker decodes the boxes; only their pixels are copied to the device, a quarter of a canvas. With
``decode`` on the device as well, nvJPEG decodes there. Resident photographs are decoded once, whole,
and boxes are cut out on the device. Canvases have a fixed shape, which CUDA graphs need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from nfold.core.errors import Unsupported
from nfold.data.arrays import Images
from nfold.data.distortion import Distorter
from nfold.data.packed_jpegs import PackedJpegs, decode_with_pillow
from nfold.data.photographs import PhotographSet
from nfold.engines.base import Task
from nfold.engines.builtin_workloads import SampleBoxes, canvas_side, draw_distortions
from nfold.engines.torch.batch import Batch, Tensors
from nfold.engines.torch.devices import Devices
from nfold.engines.torch.input.dataloader import (
    BatchKey,
    BatchKeySampler,
    LoaderSource,
    build_batch,
    copy_batch,
)
from nfold.engines.torch.input.device_dataset import available_bytes, copy_in_chunks, fits_unsharded
from nfold.instrument import torch_private

CHANNELS = 3
# bytes that a 32-bit index reaches; 64-bit arithmetic takes twice the memory bandwidth
INT32_LIMIT = 2**31


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedImages:
    """Images of many sizes in one tensor ``pixels`` uint8 [bytes] on a device.

    ``sizes`` int64 [n, 2] are their heights and widths, ``starts`` int64 [n] their first bytes, both
    on the host. ``planar``: [3, h, w], else [h, w, 3].
    """

    pixels: Tensor
    sizes: Tensor
    starts: Tensor
    planar: bool

    @classmethod
    def pack(cls, images: Sequence[Tensor]) -> PackedImages:
        sizes = torch.tensor([image.shape[1:] for image in images])
        lengths = CHANNELS * sizes.prod(1)
        pixels = torch.cat([image.reshape(-1) for image in images])
        return cls(pixels=pixels, sizes=sizes, starts=lengths.cumsum(0) - lengths, planar=True)


def crop_to_canvases(images: PackedImages, boxes: Tensor, side: int) -> Tensor:
    """Return canvases uint8 [n, side, side, 3], each with a box in its upper left corner.

    ``boxes`` int64 [n, 5] on the host are top, left, height and width in the image reduced by the
    last, a power of two. A reduced pixel is the mean of a square of pixels, cut off at the border.
    A decoder on the CPU reduces in the transform instead, with nearly the same result. Pixels
    outside the box repeat its last row and column. The number of kernels does not depend on n.
    """
    pixels, by = images.pixels, boxes[:, 4]
    dtype = torch.int32 if len(pixels) < INT32_LIMIT else torch.int64
    facts = torch.cat([boxes[:, :4], images.sizes, images.starts[:, None]], dim=1).to(dtype)
    reductions = sorted(set(by.tolist()))
    if len(reductions) == 1:
        return _crop(images, to_device_of(pixels, facts), side, reductions[0])
    canvases = pixels.new_empty((len(boxes), side, side, CHANNELS))
    for reduction in reductions:
        rows = (by == reduction).nonzero()[:, 0]
        cut = _crop(images, to_device_of(pixels, facts[rows]), side, reduction)
        canvases.index_copy_(0, to_device_of(pixels, rows), cut)
    return canvases


def to_device_of(pixels: Tensor, numbers: Tensor) -> Tensor:
    if pixels.device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(pixels.device, non_blocking=True)


def _crop(images: PackedImages, facts: Tensor, side: int, reduction: int) -> Tensor:
    """``facts`` [n, 7] are boxes, heights and widths of the images, and their first bytes."""
    top, left, tall, wide, height, width, start = facts[:, :, None].unbind(1)
    line = torch.arange(side, dtype=facts.dtype, device=facts.device)
    rows = (top + line.minimum(tall - 1)) * reduction
    columns = (left + line.minimum(wide - 1)) * reduction
    stride, plane = (1, height * width) if images.planar else (CHANNELS, torch.ones_like(height))
    colours = (line[:CHANNELS] * plane)[:, None, None]

    def pixels(down: int, right: int) -> Tensor:
        row = (rows + down).minimum(height - 1) * width * stride + start
        column = (columns + right).minimum(width - 1) * stride
        index = row[:, :, None, None] + column[:, None, :, None] + colours
        return images.pixels.index_select(0, index.flatten()).view(index.shape)

    if reduction == 1:
        return pixels(0, 0)
    total = torch.zeros((), device=facts.device)
    for down in range(reduction):
        for right in range(reduction):
            inside = ((rows + down) < height)[:, :, None] & ((columns + right) < width)[:, None]
            total = total + pixels(down, right) * inside[..., None]
    counts = (height - rows).clamp(max=reduction), (width - columns).clamp(max=reduction)
    area = counts[0][:, :, None, None] * counts[1][:, None, :, None]
    return (total / area + 0.5).to(torch.uint8)


class CanvasTransfer:
    """Moves a batch of boxes to the device and fills canvases there."""

    def __init__(self, size: int) -> None:
        self._side = canvas_side(size)

    def __call__(self, batch: Batch, device: torch.device) -> Batch:
        pixels, labels, ids, sizes = copy_batch(batch, device).tensors
        images = fill_canvases(pixels, sizes, self._side)
        return dataclasses.replace(batch, tensors=(images, labels, ids, sizes))


def fill_canvases(pixels: Tensor, sizes: Tensor, side: int) -> Tensor:
    """Return canvases uint8 [n, side, side, 3], each with a box in its upper left corner.

    ``pixels`` uint8 [total] are the boxes one after another, ``sizes`` int64 [n, 2] their heights
    and widths. Pixels outside the box repeat its last row and column.
    """
    count, device = len(sizes), pixels.device
    height, width = sizes.to(torch.int32)[:, :, None, None].unbind(1)
    area = height * width
    first = area.cumsum(0, dtype=torch.int32) - area
    line = torch.arange(side, dtype=torch.int32, device=device)
    rows = line[:, None].minimum(height - 1)
    columns = line[None, :].minimum(width - 1)
    chosen = (first + rows * width + columns).flatten()
    return pixels.view(-1, 3).index_select(0, chosen).view(count, side, side, 3)


NO_IDS = torch.empty(0, dtype=torch.int64)


class PhotographBatches(Dataset[Batch]):
    """Batches by key, made in a loader's worker; subclasses choose the tensors."""

    def __init__(self, part: PackedJpegs, task: Task, size: int) -> None:
        self._part, self._seed, self._size = part, task.plan.seed, size

    def __getitem__(self, key: BatchKey) -> Batch:
        samples = SampleBoxes(self._part, self._seed, self._size, key.epoch, key.ids)
        labels = torch.from_numpy(self._part.labels[samples.file_indices])
        return build_batch(key, self._tensors(samples, labels, key))

    def _tensors(self, samples: SampleBoxes, labels: Tensor, key: BatchKey) -> Tensors:
        raise NotImplementedError


class ImageBatches(PhotographBatches):
    """Decoded boxes or, if the plan augments on the CPU, distorted images."""

    def __init__(self, part: PackedJpegs, task: Task, size: int) -> None:
        super().__init__(part, task, size)
        self._distorts_in_worker = task.plan.augment == "cpu"
        self._distort: Distorter | None = None

    def _tensors(self, samples: SampleBoxes, labels: Tensor, key: BatchKey) -> Tensors:
        if not self._distorts_in_worker:
            return self._box_tensors(samples, labels, key)
        if self._distort is None:
            self._distort = Distorter(self._size)
        images = shared_tensor(len(samples), self._size, self._size, 3)
        target = images.numpy()
        for row, parameters in enumerate(draw_distortions(self._seed, key.epoch, key.ids)):
            self._distort(samples.decode_region(row), parameters, target[row])
        return images, labels, NO_IDS

    def _box_tensors(self, samples: SampleBoxes, labels: Tensor, key: BatchKey) -> Tensors:
        sides = np.ascontiguousarray(samples.boxes[:, 2:])
        ends = np.cumsum(3 * sides.prod(axis=1))
        pixels = shared_tensor(int(ends[-1]))
        target = pixels.numpy()
        for row, end in enumerate(ends):
            region = samples.decode_region(row)
            target[end - region.size : end].reshape(region.shape)[:] = region
        return pixels, labels, torch.from_numpy(key.ids), torch.from_numpy(sides)


def shared_tensor(*shape: int) -> Tensor:
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    count = int(np.prod(shape))
    storage = torch_private.new_shared_storage(count)
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


# JPEGs uint8 [bytes] on the host -> images uint8 [3, h, w] on the device
DecodeJpegs = Callable[[Sequence[Tensor], torch.device], list[Tensor]]


class JpegBatches(PhotographBatches):
    def _tensors(self, samples: SampleBoxes, labels: Tensor, key: BatchKey) -> Tensors:
        files = [self._part.jpeg(int(file)) for file in samples.file_indices]
        lengths = torch.tensor([len(file) for file in files])
        content = shared_tensor(int(lengths.sum()))
        np.concatenate(files, out=content.numpy())
        boxes = torch.from_numpy(np.column_stack([samples.boxes, samples.reductions]))
        boxes = torch.cat([boxes, lengths[:, None]], dim=1)
        return content, labels, torch.from_numpy(key.ids), boxes


class NvjpegTransfer:
    """Moves a batch of files to the device, decodes them in one call and fills canvases.

    The batch (files, labels, ids, boxes) becomes (images, labels, ids, sizes).
    """

    def __init__(self, size: int, decode: DecodeJpegs) -> None:
        self._side = canvas_side(size)
        self._decode = decode

    def __call__(self, batch: Batch, device: torch.device) -> Batch:
        content, _, _, boxes = batch.tensors
        files = torch.split(content, boxes[:, -1].tolist())
        images = PackedImages.pack(self._decode(files, device))
        return _canvas_batch(batch, images, boxes, self._side)


def _canvas_batch(batch: Batch, images: PackedImages, boxes: Tensor, side: int) -> Batch:
    canvases = crop_to_canvases(images, boxes[:, :5], side)
    others = (
        tensor.to(images.pixels.device, non_blocking=True)
        for tensor in (*batch.tensors[1:3], boxes[:, 2:4])
    )
    return dataclasses.replace(batch, tensors=(canvases, *others))


def torchvision_decoder() -> DecodeJpegs:
    """Return torchvision's decoder. Raises Unsupported if it is missing or has no nvJPEG."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except (ImportError, RuntimeError) as error:
        raise Unsupported(f"torchvision cannot be imported: {error}; next: --decode cpu") from error

    def decode(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        # torchvision allocates on this stream and decodes on its own, without waiting: it would
        # overwrite memory that Python freed and that earlier kernels still read.
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        try:
            return cast(
                list[Tensor], decode_jpeg(list(files), mode=ImageReadMode.RGB, device=device)
            )
        except RuntimeError as error:
            if "nvjpeg" in str(error).lower() and "compiled" in str(error).lower():
                raise Unsupported(
                    "torchvision was built without nvJPEG; next: --decode cpu"
                ) from error
            return [decode_one(file, device) for file in files]

    def decode_one(file: Tensor, device: torch.device) -> Tensor:
        try:
            return cast(Tensor, decode_jpeg(file, mode=ImageReadMode.RGB, device=device))
        except RuntimeError:
            image = decode_with_pillow(file.numpy(), 1, 1, 1)
            return torch.from_numpy(image.copy()).permute(2, 0, 1).to(device)

    return decode


class BoxBatches(PhotographBatches):
    """Boxes and file numbers, for ``ResidentCropTransfer``."""

    def _tensors(self, samples: SampleBoxes, labels: Tensor, key: BatchKey) -> Tensors:
        columns = [samples.boxes, samples.reductions, samples.file_indices]
        boxes = torch.from_numpy(np.column_stack(columns))
        return boxes, labels, torch.from_numpy(key.ids)


class ResidentCropTransfer:
    """Moves a batch of boxes to the device and cuts them out of the resident photographs."""

    def __init__(self, part: PackedJpegs, size: int, device: torch.device) -> None:
        self.pixels = copy_in_chunks(cast(Images, part.decoded_pixels), device)
        self._sizes = torch.from_numpy(np.array(part.sizes))
        self._starts = torch.from_numpy(part.pixel_offsets[:-1])
        self._side = canvas_side(size)

    def __call__(self, batch: Batch, device: torch.device) -> Batch:
        boxes = batch.tensors[0]
        files = boxes[:, 5]
        images = PackedImages(
            pixels=self.pixels, sizes=self._sizes[files], starts=self._starts[files], planar=False
        )
        return _canvas_batch(batch, images, boxes, self._side)


class ResidentImageSource(LoaderSource):
    """Batches of photographs that are decoded on this rank's device.

    Raises OutOfMemory if they do not fit on the device of any rank.
    """

    def __init__(
        self,
        photographs: PhotographSet,
        sampler: BatchKeySampler,
        size: int,
        task: Task,
        devices: Devices,
    ) -> None:
        part = photographs.train
        fits_unsharded(
            int(part.pixel_offsets[-1]),
            1,
            available_bytes(task, devices),
            ranks=task.world_size,
            device=devices.primary,
            can_shard=False,
        )
        transfer = ResidentCropTransfer(part, size, devices.primary)
        notes = (*photographs.notes, *reduction_note(part, size))
        batches = BoxBatches(part, task, size)
        super().__init__(batches, task, sampler, devices.primary, transfer, notes)
        self.data_bytes = transfer.pixels.nbytes


def reduction_note(part: PackedJpegs, size: int) -> tuple[tuple[str, str], ...]:
    """Return a caveat if boxes are reduced by means of pixels, unlike in a decoder."""
    shortest, longest = part.sizes.min(axis=1), part.sizes.max(axis=1)
    large = int(((shortest >= 2 * size) | (longest > canvas_side(size))).sum())
    if not large:
        return ()
    text = (
        f"boxes of {large} of {len(part)} resident photographs are reduced by means of pixels; a "
        "loader's decoder reduces them in the transform, with slightly other results"
    )
    return (("resident_means", text),)
