"""From what a loader's worker hands out to what a step reads: boxes' pixels laid out in canvases.

A step, which may be a CUDA graph, needs tensors of the same shape every time; on the way there
only the pixels of the boxes are copied, a quarter of what the canvases hold.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nfold.frameworks.boxes import canvas_side
from nfold.frameworks.torch.batch import Batch
from nfold.frameworks.torch.prefetch import copy_batch


class CanvasTransfer:
    """Brings a batch to the device and puts its boxes into the corners of canvases there."""

    def __init__(self, size: int) -> None:
        self._side = canvas_side(size)

    def __call__(self, batch: Batch, device: torch.device) -> Batch:
        """Tensors (images, labels, ids, places) of a batch (pixels, labels, ids, places)."""
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
