"""Other libraries compute the same convolution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from nfold.workloads.conv2d.baselines import (
    SCIPY_LIBRARIES,
    LibraryConvolution,
    images_within_limit,
    measure_library,
)
from nfold.workloads.conv2d.check import AnyFloat, scipy_reference
from nfold.workloads.conv2d.problem import ConvProblem
from nfold.workloads.conv2d.torch import torch_on_cpu


@pytest.mark.parametrize("baseline", [*SCIPY_LIBRARIES, torch_on_cpu(1)], ids=lambda b: b.name)
@pytest.mark.parametrize("width", [3, 5, 10])
@pytest.mark.parametrize("channels", [1, 3])
def test_baselines_agree_with_the_reference(
    baseline: LibraryConvolution, width: int, channels: int
) -> None:
    problem = ConvProblem(
        images=2, channels=channels, size=12, filter=width, copy_only=False, seed=0
    )
    images, filters = problem.make_images(range(2)), problem.random_filter()
    found, expected = baseline.convolve(images, filters), scipy_reference(images, filters)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_the_torch_baseline_says_its_threads_and_gives_them_back() -> None:
    import torch

    before = torch.get_num_threads()
    baseline = torch_on_cpu(before + 1)
    baseline.convolve(np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 3, 3), np.float32))
    assert f"{before + 1} threads" in baseline.name
    assert torch.get_num_threads() == before


def test_a_part_of_a_baseline_is_marked_and_counts_what_it_did() -> None:
    problem = ConvProblem(images=6, channels=1, size=8, filter=3, copy_only=False, seed=0)
    ticks = itertools.count()
    part = measure_library(SCIPY_LIBRARIES[0], problem, lambda: next(ticks) / 1000)
    assert part.baseline
    assert (part.images, part.bytes, part.note) == (6, 2 * 6 * 64 * 4, "")
    assert part.seconds == pytest.approx([0.001] * 3)


def test_a_slow_baseline_gets_fewer_images_and_says_so() -> None:
    problem = ConvProblem(images=100, channels=1, size=4, filter=3, copy_only=False, seed=0)
    now = [0.0]
    seen: list[int] = []

    def slow(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
        seen.append(len(images))
        now[0] += 0.1 * len(images)
        return images

    part = measure_library(LibraryConvolution(name="slow", convolve=slow), problem, lambda: now[0])
    assert part.images == seen[-1] == images_within_limit(0.1, 100)
    assert 1 <= part.images < 100
    assert part.note == f"on {part.images} of 100 images"
    assert images_within_limit(60.0, 100) == 1
