"""The arrays of conv2d and their split."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import signal

from nfold.core.errors import Mismatch
from nfold.workloads.conv2d.problem import (
    Array,
    ConvProblem,
    check_result,
    scipy_reference,
    spot_check_indices,
)


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
def test_random_filter_detects_every_flip(width: int) -> None:
    filters = problem(width=width).random_filter()[0, 0]
    for flipped in (filters[::-1], filters[:, ::-1], filters[::-1, ::-1], filters.T):
        assert not np.array_equal(filters, flipped)


def test_the_mean_filters_of_a_result_sum_to_one() -> None:
    assert problem().mean_filter().sum(axis=(1, 2, 3)) == pytest.approx([1, 1])


PROBLEM = ConvProblem(images=3, channels=1, size=8, filter=3, copy_only=False, seed=0)
IMAGES = PROBLEM.make_images(range(3))
FILTERS = PROBLEM.random_filter()
EXPECTED = scipy_reference(IMAGES, FILTERS)


def single(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Array:
    return values.astype(np.float32)


def test_the_reference_is_scipys_summed_over_input_channels() -> None:
    two = ConvProblem(images=1, channels=2, size=6, filter=3, copy_only=False, seed=0)
    images, filters = two.make_images([0]), two.random_filter()
    by_hand = sum(
        signal.convolve2d(images[0, c].astype(float), filters[1, c].astype(float), mode="same")
        for c in range(2)
    )
    assert scipy_reference(images, filters)[0, 1] == pytest.approx(by_hand)


def test_a_rounded_result_passes() -> None:
    check_result(single(EXPECTED), EXPECTED, [0, 1, 2], "fp32")


def test_correlation_is_a_mismatch_with_image_and_size() -> None:
    wrong = scipy_reference(IMAGES, FILTERS[..., ::-1, ::-1])
    wrong[:2] = EXPECTED[:2]
    largest = np.abs(wrong - EXPECTED).max()
    with pytest.raises(Mismatch, match=rf"image 839 differs .* {largest:.3g};"):
        check_result(single(wrong), EXPECTED, [0, 420, 839], "fp32")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_a_mismatch(value: float) -> None:
    wrong = single(EXPECTED)
    wrong[1, 0, 2, 2] = value
    with pytest.raises(Mismatch, match="image 1 "):
        check_result(wrong, EXPECTED, [0, 1, 2], "bf16")


def test_another_shape_is_a_mismatch() -> None:
    with pytest.raises(Mismatch, match="shape"):
        check_result(single(EXPECTED)[..., :-1], EXPECTED, [0, 1, 2], "fp32")


def test_the_tolerance_follows_the_precision() -> None:
    rounded = single(EXPECTED * (1 + 2**-9))
    check_result(rounded, EXPECTED, [0, 1, 2], "bf16")
    with pytest.raises(Mismatch, match="fp32"):
        check_result(rounded, EXPECTED, [0, 1, 2], "fp32")


@pytest.mark.parametrize(("count", "places"), [(0, []), (1, [0]), (2, [0, 1]), (9, [0, 4, 8])])
def test_a_handful_is_first_middle_and_last(count: int, places: list[int]) -> None:
    assert spot_check_indices(count) == places
