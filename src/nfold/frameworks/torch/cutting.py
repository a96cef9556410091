"""Boxes of images of many sizes into canvases, with as many kernels for 8 images as for 256.

All images lie one after another in one tensor; where a canvas's pixels come from is arithmetic on
indices. Nothing waits for the device: the host knows the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
