"""The same convolution by other libraries on the CPU: what the devices have to beat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np
from scipy import ndimage

from nfold.measurement import Part
from nfold.workloads.conv2d.check import AnyFloat, convolve_image
from nfold.workloads.conv2d.problem import Problem
from nfold.workloads.conv2d.sampling import Clock

REPEATS = 3
CALL_BUDGET_S = 2.0
"""Longer than this no call should take: then it gets fewer images, and the part says so."""
TRIAL_IMAGES = 4

Convolve = Callable[[AnyFloat, AnyFloat], AnyFloat]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A way to convolve images [n, c, h, w] with filters [c, c, k, k] without the devices."""

    name: str
    convolve: Convolve


def with_convolve2d(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
    """``scipy.signal.convolve2d(mode="same")``, image by image in a Python loop."""
    return np.stack([convolve_image(image, filters) for image in images])


def with_ndimage(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
    """``scipy.ndimage.convolve(mode="constant")``, image by image in a Python loop."""
    return np.stack([_ndimage_image(image, filters) for image in images])


def _ndimage_image(image: AnyFloat, filters: AnyFloat) -> AnyFloat:
    """An even filter has no middle: ndimage takes the pixel after it, convolve2d the one before."""
    origin = -1 if filters.shape[-1] % 2 == 0 else 0

    def one(x: AnyFloat, f: AnyFloat) -> AnyFloat:
        made: AnyFloat = ndimage.convolve(x, f, mode="constant", origin=origin)
        return made

    sums = [reduce(np.add, map(one, image, per_channel)) for per_channel in filters]
    return np.stack(sums)


SCIPY = (
    Baseline(name="scipy.signal.convolve2d, 1 core", convolve=with_convolve2d),
    Baseline(name="scipy.ndimage.convolve, 1 core", convolve=with_ndimage),
)


def measure(baseline: Baseline, problem: Problem, clock: Clock) -> Part:
    """Time a baseline on the whole batch, or on as many images as the time budget allows."""
    filters = problem.ones()
    images = problem.make_images(range(min(TRIAL_IMAGES, problem.images)))
    baseline.convolve(images, filters)
    trial = _seconds(baseline, images, filters, clock)
    count = affordable(trial / len(images), problem.images)
    images = problem.make_images(range(count))
    return Part(
        name=baseline.name,
        seconds=tuple(_seconds(baseline, images, filters, clock) for _ in range(REPEATS)),
        images=count,
        bytes=2 * images.nbytes,
        baseline=True,
        note="" if count == problem.images else f"on {count} of {problem.images} images",
    )


def affordable(seconds_per_image: float, images: int) -> int:
    """How many of the images fit into one call's time budget: at least one."""
    if seconds_per_image * images <= CALL_BUDGET_S:
        return images
    return max(1, int(CALL_BUDGET_S / seconds_per_image))


def _seconds(baseline: Baseline, images: AnyFloat, filters: AnyFloat, clock: Clock) -> float:
    start = clock()
    baseline.convolve(images, filters)
    return clock() - start
