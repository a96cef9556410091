"""Boxes of images of many sizes into canvases, with as many kernels for 8 images as for 256.

All images lie one after another in one tensor; where a canvas's pixels come from is arithmetic on
indices. Nothing waits for the device: the host knows the sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
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
from nfold.engines.sampling import sample_hash
from nfold.engines.torch.batch import Batch, CanvasTensors, Tensors
from nfold.engines.torch.communication.data_parallel import all_reduce_min
from nfold.engines.torch.devices import Devices
from nfold.engines.torch.input.dataloader import BatchKey, BatchKeySampler, LoaderSource, copy_batch
from nfold.engines.torch.input.device_dataset import available_bytes, check_fits, copy_in_chunks

CHANNELS = 3
INT32_LIMIT = 2**31
"""Bytes that a 32-bit index reaches; arithmetic on 64 bits takes twice the memory's time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedImages:
    """Images of some samples in ``pixels`` uint8 [bytes], on a device.

    ``sizes`` int64 [n, 2] are their heights and widths, ``starts`` int64 [n] where each begins,
    both on the host. A pixel's colours lie together, or in ``planes`` of one colour each.
    """

    pixels: Tensor
    sizes: Tensor
    starts: Tensor
    planar: bool

    @classmethod
    def pack(cls, images: Sequence[Tensor]) -> PackedImages:
        """Images uint8 [3, h, w] that lie anywhere on one device."""
        sizes = torch.tensor([image.shape[1:] for image in images])
        lengths = CHANNELS * sizes.prod(1)
        pixels = torch.cat([image.reshape(-1) for image in images])
        return cls(pixels=pixels, sizes=sizes, starts=lengths.cumsum(0) - lengths, planar=True)


def crop_to_canvases(images: PackedImages, boxes: Tensor, side: int) -> Tensor:
    """Canvases uint8 [n, side, side, 3], each box in the upper left corner of its own.

    ``boxes`` int64 [n, 5] on the host are top, left, height and width in the image reduced by the
    last, a power of two: a pixel is the mean of the square that it stands for, at the border of
    what there is of it. What is not a box's repeats its last row and column. A decoder on the CPU
    leaves detail out in the transform instead: nearly the same.
    """
    pixels, by = images.pixels, boxes[:, 4]
    kind = torch.int32 if len(pixels) < INT32_LIMIT else torch.int64
    facts = torch.cat([boxes[:, :4], images.sizes, images.starts[:, None]], dim=1).to(kind)
    present = sorted(set(by.tolist()))
    if len(present) == 1:
        return _crop(images, to_device_of(pixels, facts), side, present[0])
    canvases = pixels.new_empty((len(boxes), side, side, CHANNELS))
    for reduction in present:
        rows = (by == reduction).nonzero()[:, 0]
        cut = _crop(images, to_device_of(pixels, facts[rows]), side, reduction)
        canvases.index_copy_(0, to_device_of(pixels, rows), cut)
    return canvases


def to_device_of(pixels: Tensor, numbers: Tensor) -> Tensor:
    """Numbers of the host where the pixels are."""
    if pixels.device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(pixels.device, non_blocking=True)


def _crop(images: PackedImages, facts: Tensor, side: int, reduction: int) -> Tensor:
    """The canvases of samples that are all reduced by as much.

    ``facts`` [n, 7] are boxes, heights and widths of the images, and where they begin.
    """
    top, left, tall, wide, height, width, start = facts[:, :, None].unbind(1)
    line = torch.arange(side, dtype=facts.dtype, device=facts.device)
    rows = (top + line.minimum(tall - 1)) * reduction
    columns = (left + line.minimum(wide - 1)) * reduction
    apart, plane = (1, height * width) if images.planar else (CHANNELS, torch.ones_like(height))
    colours = (line[:CHANNELS] * plane)[:, None, None]

    def pixels(down: int, right: int) -> Tensor:
        row = (rows + down).minimum(height - 1) * width * apart + start
        column = (columns + right).minimum(width - 1) * apart
        place = row[:, :, None, None] + column[:, None, :, None] + colours
        return images.pixels.index_select(0, place.flatten()).view(place.shape)

    if reduction == 1:
        return pixels(0, 0)
    total = torch.zeros((), device=facts.device)
    for down in range(reduction):
        for right in range(reduction):
            within = ((rows + down) < height)[:, :, None] & ((columns + right) < width)[:, None]
            total = total + pixels(down, right) * within[..., None]
    there = (height - rows).clamp(max=reduction), (width - columns).clamp(max=reduction)
    area = there[0][:, :, None, None] * there[1][:, None, :, None]
    return (total / area + 0.5).to(torch.uint8)


# From what a loader's worker hands out to what a step reads: boxes' pixels laid out in canvases.
#
# A step, which may be a CUDA graph, needs tensors of the same shape every time; on the way there
# only the pixels of the boxes are copied, a quarter of what the canvases hold.


class CanvasTransfer:
    """Brings a batch to the device and puts its boxes into the corners of canvases there."""

    def __init__(self, size: int) -> None:
        self._side = canvas_side(size)

    def __call__(self, batch: Batch, device: torch.device) -> Batch:
        pixels, labels, ids, places = copy_batch(batch, device).tensors
        return dataclasses.replace(
            batch, tensors=(fill_canvases(pixels, places, self._side), labels, ids, places)
        )


def fill_canvases(pixels: Tensor, sizes: Tensor, side: int) -> Tensor:
    """Images uint8 [n, side, side, 3] with each box in its upper left corner.

    ``pixels`` uint8 [total] has the boxes one after another, ``places`` int64 [n, 2] are their
    heights and widths. What is not a box's repeats its last row and column; nobody looks at it.
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


# Batches of photographs: what a loader's worker does of decoding and distorting, by the plan.
#
# With everything on the CPU a worker hands out finished images. With ``augment`` on the device it
# decodes, and hands out the boxes' pixels, one after another, without any that nobody looks at. With
# ``decode`` on the device as well it hands out the JPEGs as they are.

NO_IDS = torch.empty(0, dtype=torch.int64)


class ImageBatches(Dataset[Batch]):
    """Whole batches by key, decoded and perhaps distorted, in a loader's worker."""

    def __init__(self, part: PackedJpegs, task: Task, size: int) -> None:
        self._part = part
        self._seed = task.plan.seed
        self._size = size
        self._distorts_in_worker = task.plan.augment == "cpu"
        self._distort: Distorter | None = None

    def __getitem__(self, key: BatchKey) -> Batch:
        drawn = SampleBoxes(self._part, self._seed, self._size, key.epoch, key.ids)
        labels = torch.from_numpy(self._part.labels[drawn.file_indices])
        tensors = (
            self._distorted_tensors(drawn, key, labels)
            if self._distorts_in_worker
            else self._box_tensors(drawn, key, labels)
        )
        return build_batch(key, tensors)

    def _distorted_tensors(self, drawn: SampleBoxes, key: BatchKey, labels: Tensor) -> Tensors:
        if self._distort is None:
            self._distort = Distorter(self._size)
        images = shared_tensor(len(drawn), self._size, self._size, 3)
        into = images.numpy()
        for row, look in enumerate(draw_distortions(self._seed, key.epoch, key.ids)):
            self._distort(drawn.decode_region(row), look, into[row])
        return images, labels, NO_IDS

    def _box_tensors(self, drawn: SampleBoxes, key: BatchKey, labels: Tensor) -> Tensors:
        sides = np.ascontiguousarray(drawn.boxes[:, 2:])
        ends = np.cumsum(3 * sides.prod(axis=1))
        pixels = shared_tensor(int(ends[-1]))
        into = pixels.numpy()
        for row, end in enumerate(ends):
            region = drawn.decode_region(row)
            into[end - region.size : end].reshape(region.shape)[:] = region
        return pixels, labels, torch.from_numpy(key.ids), torch.from_numpy(sides)


def build_batch(key: BatchKey, tensors: Tensors) -> Batch:
    """The batch of a key."""
    return Batch(
        tensors=tensors,
        epoch=key.epoch,
        count=key.count,
        global_count=key.global_count,
        sample_hash=sample_hash(key.ids[: key.count]),
    )


def shared_tensor(*shape: int) -> Tensor:
    """An empty uint8 tensor; in a loader's worker in the memory that it is handed over in."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    count = int(np.prod(shape))
    storage = torch.UntypedStorage._new_shared(count)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


# JPEGs decoded on the GPU: nvJPEG, through torchvision where it was built with CUDA.
#
# A worker hands out files as they are; the device decodes them, cuts out the boxes and lays them in
# canvases, on the stream beside the step. What nvJPEG does not know (CMYK) the host decodes.

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
    try:
        return decode_jpeg(file, mode=mode, device=device)
    except RuntimeError:
        image = decode_with_pillow(file.numpy(), 1, 1, 1)
        return torch.from_numpy(image.copy()).permute(2, 0, 1).to(device)


# Resident photographs: decoded once, whole, on every device; a step's boxes are cut out there.
#
# The host draws the boxes of each batch, a few kilobytes. Boxes that are decoded at a reduced scale
# elsewhere are means of pixels here, as nvJPEG's are (docs/decisions/input-pipeline.md).


class BoxBatches(Dataset[Batch]):
    """Which part of which photograph every sample of a batch is; no pixel is touched."""

    def __init__(self, part: PackedJpegs, task: Task, size: int) -> None:
        self._part, self._seed, self._size = part, task.plan.seed, size

    def __getitem__(self, key: BatchKey) -> Batch:
        drawn = SampleBoxes(self._part, self._seed, self._size, key.epoch, key.ids)
        boxes = torch.from_numpy(
            np.column_stack([drawn.boxes, drawn.reductions, drawn.file_indices])
        )
        labels = torch.from_numpy(self._part.labels[drawn.file_indices])
        return build_batch(key, (boxes, labels, torch.from_numpy(key.ids)))


class ResidentCropTransfer:
    """Brings a batch to the device as ``Canvases`` does, its pixels cut out of what lies there."""

    def __init__(self, part: PackedJpegs, size: int, device: torch.device) -> None:
        self.pixels = copy_in_chunks(cast(Images, part.decoded_pixels), device)
        self._sizes = torch.from_numpy(np.array(part.sizes))
        self._starts = torch.from_numpy(part.pixel_offsets[:-1])
        self._side = canvas_side(size)

    def __call__(self, batch: Batch, device: torch.device) -> Batch:
        boxes, labels, ids = batch.tensors
        files = boxes[:, 5]
        images = PackedImages(
            pixels=self.pixels, sizes=self._sizes[files], starts=self._starts[files], planar=False
        )
        laid = crop_to_canvases(images, boxes[:, :5], self._side)
        labels, ids, places = (
            tensor.to(device, non_blocking=True) for tensor in (labels, ids, boxes[:, 2:4])
        )
        return dataclasses.replace(batch, tensors=(laid, labels, ids, places))


class ResidentImageSource:
    """The batches of photographs that lie decoded on this rank's device.

    Raises OutOfMemory, with the sizes, where any rank's device has not the memory.
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
        _check_memory(part, task, devices)
        cut = ResidentCropTransfer(part, size, devices.primary)
        notes = (*photographs.notes, *reduction_note(part, size))
        boxes = BoxBatches(part, task, size)
        self._source = LoaderSource(boxes, task, sampler, devices.primary, cut, notes)
        self.data_bytes = cut.pixels.nbytes
        self.epoch = 0

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """Of bad files, and of boxes that are means of pixels."""
        return self._source.notes

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Batch]:
        self._source.epoch = self.epoch
        return iter(self._source)

    def unpack(self, tensors: Tensors) -> CanvasTensors:
        """The samples, which the tensors are."""
        return CanvasTensors(*tensors)


def reduction_note(part: PackedJpegs, size: int) -> tuple[tuple[str, str], ...]:
    """What is not the same work as a loader's, as (kind, text); nothing where no box is reduced."""
    shortest, longest = part.sizes.min(axis=1), part.sizes.max(axis=1)
    large = int(((shortest >= 2 * size) | (longest > canvas_side(size))).sum())
    if not large:
        return ()
    text = (
        f"{large} of {len(part)} resident photographs are so large that boxes of them are reduced: "
        "by means of pixels, where a loader's decoder leaves out detail"
    )
    return (("resident_means", text),)


def _check_memory(part: PackedJpegs, task: Task, devices: Devices) -> None:
    needed, ranks = int(part.pixel_offsets[-1]), task.world_size
    where = str(devices.primary) if ranks == 1 else f"each of {ranks} GPUs"
    if not devices.is_cuda:
        needed, where = ranks * needed, f"the host ({ranks} ranks)"
    check_fits(
        needed, all_reduce_min(available_bytes(task, devices), ranks, devices.primary), where
    )
