"""The arrays of conv2d and their split."""

from __future__ import annotations

import numpy as np
import pytest

from nfold.workloads.conv2d.problem import ConvProblem


def problem(images: int = 7, channels: int = 2, size: int = 5, width: int = 3) -> ConvProblem:
    return ConvProblem(
        images=images, channels=channels, size=size, filter=width, copy_only=False, seed=3
    )


@pytest.mark.parametrize(("images", "count"), [(7, 3), (840, 8), (8, 8)])
def test_shares_cover_every_image_once_and_differ_by_one(images: int, count: int) -> None:
    shares = [problem(images).images_of_device(index, count) for index in range(count)]
    assert [image for share in shares for image in share] == list(range(images))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_shares_of_processes_with_several_devices_are_those_of_all_devices() -> None:
    several = problem().images_of_rank(0, 2, 2) + problem().images_of_rank(1, 2, 2)
    assert several == [problem().images_of_device(index, 4) for index in range(4)]


def test_an_image_does_not_depend_on_the_split() -> None:
    whole = problem().make_images(range(7))
    assert np.array_equal(whole[2:4], problem().make_images(range(2, 4)))
    assert len({image.tobytes() for image in whole}) == 7
    assert whole.dtype == np.float32
    assert 0 <= whole.min() < whole.max() < 1


@pytest.mark.parametrize("width", [3, 5, 10])
def test_the_random_filter_tells_every_flip_apart(width: int) -> None:
    filters = problem(width=width).random_filter()[0, 0]
    for flipped in (filters[::-1], filters[:, ::-1], filters[::-1, ::-1], filters.T):
        assert not np.array_equal(filters, flipped)


def test_the_mean_filters_of_a_result_sum_to_one() -> None:
    assert problem().mean_filter().sum(axis=(1, 2, 3)) == pytest.approx([1, 1])
