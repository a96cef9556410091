"""The same convolution by other libraries on the CPU: what the devices have to beat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np
from scipy import ndimage

from nfold.measurement import OperationPart
from nfold.workloads.conv2d.check import AnyFloat, convolve_image
from nfold.workloads.conv2d.problem import ConvProblem
from nfold.workloads.conv2d.sampling import Clock

REPEATS = 3
CALL_LIMIT_S = 2.0
"""Longer than this no call should take: then it gets fewer images, and the part says so."""
TRIAL_IMAGES = 4

Convolve = Callable[[AnyFloat, AnyFloat], AnyFloat]


@dataclass(frozen=True, kw_only=True)
class LibraryConvolution:
    """A way to convolve images [n, c, h, w] with filters [c, c, k, k] without the devices."""

    name: str
    convolve: Convolve


def convolve_scipy_signal(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
    """``scipy.signal.convolve2d(mode="same")``, image by image in a Python loop."""
    return np.stack([convolve_image(image, filters) for image in images])


def convolve_scipy_ndimage(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
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


SCIPY_LIBRARIES = (
    LibraryConvolution(name="scipy.signal.convolve2d, 1 core", convolve=convolve_scipy_signal),
    LibraryConvolution(name="scipy.ndimage.convolve, 1 core", convolve=convolve_scipy_ndimage),
)


def measure_library(
    baseline: LibraryConvolution, problem: ConvProblem, clock: Clock
) -> OperationPart:
    """Time a baseline on the whole batch, or on as many images as the time budget allows."""
    filters = problem.ones_filter()
    images = problem.make_images(range(min(TRIAL_IMAGES, problem.images)))
    baseline.convolve(images, filters)
    trial = _time_call(baseline, images, filters, clock)
    count = images_within_limit(trial / len(images), problem.images)
    images = problem.make_images(range(count))
    return OperationPart(
        name=baseline.name,
        seconds=tuple(_time_call(baseline, images, filters, clock) for _ in range(REPEATS)),
        images=count,
        bytes=2 * images.nbytes,
        baseline=True,
        note="" if count == problem.images else f"on {count} of {problem.images} images",
    )


def images_within_limit(seconds_per_image: float, images: int) -> int:
    """How many of the images fit into one call's time budget: at least one."""
    if seconds_per_image * images <= CALL_LIMIT_S:
        return images
    return max(1, int(CALL_LIMIT_S / seconds_per_image))


def _time_call(
    baseline: LibraryConvolution, images: AnyFloat, filters: AnyFloat, clock: Clock
) -> float:
    start = clock()
    baseline.convolve(images, filters)
    return clock() - start
