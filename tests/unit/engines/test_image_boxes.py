"""Random boxes: their range, their position, and the scale at which they are decoded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from nfold.engines.builtin_workloads import canvas_side, decode_reductions, draw_boxes, scale_boxes


def drawn(
    height: int, width: int, n: int = 3000, seed: int = 0, epoch: int = 0
) -> npt.NDArray[np.int64]:
    return draw_boxes(seed, epoch, np.arange(n), np.tile([height, width], (n, 1)))


@pytest.mark.parametrize("size", [(375, 500), (500, 375), (60, 60), (50, 400), (3, 2)])
def test_a_box_lies_in_its_image_and_has_its_area_and_aspect(size: tuple[int, int]) -> None:
    height, width = size
    top, left, tall, wide = drawn(height, width).T
    assert min(top.min(), left.min()) >= 0
    assert (top + tall <= height).all()
    assert (left + wide <= width).all()
    assert min(tall.min(), wide.min()) >= 1
    if min(size) > 30:
        area = tall * wide / (height * width)
        assert area.min() > 0.04  # of whole pixels
        aspect = wide / tall
        assert 0.7 < aspect.min() <= aspect.max() < 1.42


def test_boxes_cover_the_range() -> None:
    top, left, tall, wide = drawn(375, 500).T
    area = tall * wide / (375 * 500)
    assert area.min() < 0.06
    assert area.max() > 0.95
    assert 0 in top
    assert 0 in left
    assert (top + tall == 375).any()


def test_an_image_without_such_a_box_is_taken_whole() -> None:
    assert drawn(10, 400, n=50).tolist() == [[0, 0, 10, 400]] * 50


def test_boxes_depend_on_seed_and_epoch_and_sample_only() -> None:
    first = drawn(375, 500)
    assert np.array_equal(first[:10], drawn(375, 500, n=10))
    assert not np.array_equal(first, drawn(375, 500, seed=1))
    assert not np.array_equal(first, drawn(375, 500, epoch=1))


@pytest.mark.parametrize(
    ("tall", "wide", "reduction"),
    [
        (300, 300, 1),
        (512, 400, 1),
        (513, 400, 2),
        (598, 598, 2),
        (1196, 1300, 4),
        (65_535, 65_535, 128),
        (10, 700, 2),
    ],
)
def test_the_scale_loses_nothing_that_fits_a_canvas(tall: int, wide: int, reduction: int) -> None:
    box = np.array([[8, 16, tall, wide]])
    by = decode_reductions(box, 299)
    assert by.tolist() == [reduction]
    smaller = scale_boxes(box, by)[0]
    assert max(smaller[2:]) <= canvas_side(299)
    assert smaller.tolist()[:2] == [8 // reduction, 16 // reduction]
