"""Boxes of decoded images of many sizes into canvases, with as many kernels for 8 as for 256.

All images lie after one another in one tensor; where a canvas's pixels come from is arithmetic on
indices. Nothing waits for the host: it knows the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHANNELS = 3
SMALL = 2**31
"""Bytes that a 32-bit index reaches; arithmetic on 64 bits takes twice the memory's time."""


def cut_out(images: Sequence[Tensor], boxes: Tensor, side: int) -> Tensor:
    """Canvases uint8 [n, side, side, 3], each box in the upper left corner of its own.

    ``images`` are uint8 [3, h, w] on one device; ``boxes`` int64 [n, 5] on the host are top, left,
    height and width in the image reduced by the last, a power of two: a pixel is the mean of the
    square that it stands for, at the border of what there is of it. What is not a box's repeats
    its last row and column. A decoder on the CPU leaves detail out in the transform instead:
    nearly the same.
    """
    packed = torch.cat([image.reshape(-1) for image in images])
    sizes = torch.tensor([image.shape[1:] for image in images])
    starts = (CHANNELS * sizes.prod(1)).cumsum(0).roll(1)
    starts[0] = 0
    kind = torch.int32 if len(packed) < SMALL else torch.int64
    facts = torch.cat([boxes[:, :4], sizes, starts[:, None]], dim=1).to(kind)
    by = boxes[:, 4]
    present = by.unique().tolist()
    if len(present) == 1:
        return _cut(packed, on(packed, facts), side, present[0])
    canvases = packed.new_empty((len(images), side, side, CHANNELS))
    for reduction in present:
        rows = (by == reduction).nonzero()[:, 0]
        cut = _cut(packed, on(packed, facts[rows]), side, reduction)
        canvases.index_copy_(0, on(packed, rows), cut)
    return canvases


def on(packed: Tensor, numbers: Tensor) -> Tensor:
    """Numbers of the host where the images are."""
    if packed.device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(packed.device, non_blocking=True)


def _cut(packed: Tensor, facts: Tensor, side: int, reduction: int) -> Tensor:
    """The canvases of images that are all reduced by as much.

    ``facts`` [n, 7] are boxes, heights and widths of the images, and where they begin.
    """
    top, left, tall, wide, height, width, start = facts[:, :, None].unbind(1)
    line = torch.arange(side, dtype=facts.dtype, device=facts.device)
    rows = (top + line.minimum(tall - 1)) * reduction
    columns = (left + line.minimum(wide - 1)) * reduction
    channels = line[:CHANNELS] * (height * width)

    def pixels(down: int, right: int) -> Tensor:
        row = (rows + down).minimum(height - 1) * width + start
        column = (columns + right).minimum(width - 1)
        place = row[:, :, None, None] + column[:, None, :, None] + channels[:, None, None]
        return packed.index_select(0, place.flatten()).view(place.shape)

    if reduction == 1:
        return pixels(0, 0)
    total = torch.zeros((), device=packed.device)
    for down in range(reduction):
        for right in range(reduction):
            within = ((rows + down) < height)[:, :, None] & ((columns + right) < width)[:, None]
            total = total + pixels(down, right) * within[..., None]
    there = (height - rows).clamp(max=reduction), (width - columns).clamp(max=reduction)
    area = there[0][:, :, None, None] * there[1][:, None, :, None]
    return (total / area + 0.5).to(torch.uint8)
