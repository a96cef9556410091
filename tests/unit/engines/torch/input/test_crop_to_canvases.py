"""Boxes of many images cut out together equal those cut out one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nfold.engines.torch.input import image_files
from nfold.engines.torch.input.image_files import PackedImages, crop_to_canvases, fill_canvases
from photos import picture

SIDE = 40
SIZES = ((60, 90), (37, 41), (200, 131), (60, 90), (163, 97))


def images() -> list[Tensor]:
    made = [picture(height, width, seed) for seed, (height, width) in enumerate(SIZES)]
    return [torch.from_numpy(image.transpose(2, 0, 1).copy()) for image in made]


def one_by_one(given: list[Tensor], boxes: Tensor) -> Tensor:
    """Each image reduced by means over squares, its box taken, and laid into a canvas."""
    pixels = []
    for image, row in zip(given, boxes.tolist(), strict=True):
        top, left, height, width, by = row
        whole = functional.avg_pool2d(
            image[None].double(), by, ceil_mode=True, count_include_pad=False
        )
        box = whole[0, :, top : top + height, left : left + width]
        pixels.append((box + 0.5).floor().permute(1, 2, 0).flatten().to(torch.uint8))
    return fill_canvases(torch.cat(pixels), boxes[:, 2:4], SIDE)


def boxes_of(reductions: tuple[int, ...]) -> Tensor:
    """A box in the middle, one in a corner, and one that ends with its image."""
    rows = []
    for number, ((height, width), by) in enumerate(zip(SIZES, reductions, strict=True)):
        tall, wide = -(-height // by), -(-width // by)
        size = min(tall, SIDE - number), min(wide, SIDE)
        rows.append((tall - size[0], (wide - size[1]) // 2, *size, by))
    return torch.tensor(rows)


@pytest.mark.parametrize("reductions", [(1, 1, 1, 1, 1), (2, 2, 2, 2, 2), (1, 4, 1, 2, 8)])
@pytest.mark.parametrize("small", [image_files.INT32_LIMIT, 0])
def test_boxes_are_those_of_one_image_after_the_other(
    reductions: tuple[int, ...], small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_files, "INT32_LIMIT", small)
    boxes, given = boxes_of(reductions), images()
    expected = one_by_one(given, boxes)
    planes = PackedImages.pack(given)
    assert torch.equal(crop_to_canvases(planes, boxes, SIDE), expected)
    mixed = torch.cat([image.permute(1, 2, 0).flatten() for image in given])
    pixels = PackedImages(pixels=mixed, sizes=planes.sizes, starts=planes.starts, planar=False)
    assert torch.equal(crop_to_canvases(pixels, boxes, SIDE), expected)


def test_a_reduced_pixel_at_the_border_is_the_mean_of_what_there_is() -> None:
    image = torch.arange(3 * 5 * 3, dtype=torch.uint8).view(3, 5, 3)
    canvas = crop_to_canvases(PackedImages.pack([image]), torch.tensor([[2, 1, 1, 1, 2]]), 32)
    assert np.array_equal(canvas[0, 0, 0], image[:, 4, 2])
    assert bool((canvas == canvas[:, :1, :1]).all())
