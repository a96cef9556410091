"""The task of a rank, images and filters; scipy's reference and the comparison with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import signal

from nfold.core.errors import Mismatch
from nfold.core.plan import Plan
from nfold.core.variant import Variant

Array = npt.NDArray[np.float32]

RANDOM_FILTER_SEED = 1


@dataclass(frozen=True, kw_only=True)
class ConvProblem:
    """Images [n, channels, size, size] and filters [channels out, channels in, filter, filter].

    A result channel is the sum over the input channels of their convolutions.
    """

    images: int
    channels: int
    size: int
    filter: int
    copy_only: bool
    seed: int

    def images_of_device(self, index: int, count: int) -> range:
        """Return the images of device ``index`` of ``count``; shares differ by at most one."""
        return range(index * self.images // count, (index + 1) * self.images // count)

    def images_of_rank(self, rank: int, world_size: int, devices: int) -> list[range]:
        """Return the images of each of a rank's ``devices``, consecutive."""
        first, count = rank * devices, world_size * devices
        return [self.images_of_device(index, count) for index in range(first, first + devices)]

    def value_count(self, images: int) -> int:
        return images * self.channels * self.size**2

    def make_images(self, indices: Sequence[int]) -> Array:
        """Return images [n, channels, size, size], uniform in [0, 1).

        An image depends only on the seed and its index, not on the split over devices.
        """
        images = np.empty((len(indices), self.channels, self.size, self.size), np.float32)
        for image, index in zip(images, indices, strict=True):
            np.random.default_rng([self.seed, index]).random(dtype=np.float32, out=image)
        return images

    def ones_filter(self) -> Array:
        shape = (self.channels, self.channels, self.filter, self.filter)
        return np.ones(shape, np.float32)

    def mean_filter(self) -> Array:
        """Return filters with sum 1 per result, so that chained convolutions stay finite."""
        return self.ones_filter() / np.float32(self.channels * self.filter**2)

    def random_filter(self) -> Array:
        """Return random filters, which detect a flip or a shift.

        Multiples of 1/8 between -1 and 1 are exact in every precision.
        """
        values = np.random.default_rng(RANDOM_FILTER_SEED).integers(-8, 9, self.ones_filter().shape)
        return (values / 8).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class ConvTask:
    """The task of one rank, with a complete plan and all parameters.

    ``devices`` are driven by this process, the same number on every rank. ``barrier`` waits for
    all ranks; ``beat`` takes (calls done, calls planned). Under an experiment's ``variant`` only
    the throughput is timed.
    """

    parameters: Mapping[str, int]
    plan: Plan
    rank: int
    world_size: int
    devices: Sequence[Any]
    barrier: Callable[[], None]
    beat: Callable[[int, int], None]
    variant: Variant = field(default_factory=Variant)

    @property
    def problem(self) -> ConvProblem:
        assert self.plan.batch is not None
        sizes = {name: self.parameters[name] for name in ("channels", "size", "filter")}
        copy_only = bool(self.parameters["copy_only"])
        return ConvProblem(
            images=self.plan.batch, copy_only=copy_only, seed=self.plan.seed, **sizes
        )

    @property
    def device_images(self) -> list[range]:
        return self.problem.images_of_rank(self.rank, self.world_size, len(self.devices))

    @property
    def cores(self) -> int:
        """The cores of this process, at most the plan's, because a mask does not show a quota."""
        planned = (self.plan.cores_per_device or 1) * (self.plan.devices or 1)
        return min(len(os.sched_getaffinity(0)), planned)


def to_correlation(filters: Array) -> Array:
    """Flip filters: libraries compute the correlation, which is then the convolution."""
    return filters[..., ::-1, ::-1].copy()


AnyFloat = npt.NDArray[np.floating]

# The largest difference allowed, relative to the largest value of the reference.
#
# A few units in the last place of each format (24, 11, 8 and 11 significant bits), with room for
# the error of Winograd's algorithm (Lavin and Gray, CVPR 2016). fp32's bound also detects tf32:
# rounding images to 11 bits gives errors from 2.3e-4 with random filters.
TOLERANCES: dict[str, float] = {"fp32": 5e-5, "tf32": 5e-3, "bf16": 2e-2, "fp16": 5e-3}


def convolve_image(image: AnyFloat, filters: AnyFloat) -> AnyFloat:
    """Convolve an image [channels in, h, w] by scipy with mode ``same``.

    ``filters`` are [channels out, channels in, k, k]; the result is [channels out, h, w].
    """

    def convolve(per_channel: AnyFloat) -> AnyFloat:
        pairs = zip(image, per_channel, strict=True)
        return reduce(np.add, [signal.convolve2d(x, f, mode="same") for x, f in pairs])

    return np.stack([convolve(per_channel) for per_channel in filters])


def scipy_reference(images: AnyFloat, filters: AnyFloat) -> npt.NDArray[np.float64]:
    filters = filters.astype(np.float64)
    return np.stack([convolve_image(image.astype(np.float64), filters) for image in images])


def spot_check_indices(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1}) if count else []


def check_result(
    result: AnyFloat, expected: AnyFloat, images: Sequence[int], precision: str
) -> None:
    """Raise Mismatch if a result [n, ...] differs from the expected one, or is not finite.

    ``images`` are the indices for the message. Differences are relative to the largest expected
    value, because a sum rounds in units of its largest terms.
    """
    if result.shape != expected.shape:
        raise Mismatch(f"the result has shape {result.shape}, its reference {expected.shape}")
    gaps = np.abs(result.astype(np.float64) - expected).reshape(len(images), -1).max(axis=1)
    worst = int(np.argmax(np.where(np.isfinite(gaps), gaps, np.inf)))
    scale = float(np.abs(expected).max())
    allowed = TOLERANCES[precision] * scale
    if not gaps[worst] <= allowed:
        raise Mismatch(
            f"image {images[worst]} differs from scipy's by up to {gaps[worst]:.3g}; allowed at "
            f"{precision} are {allowed:.3g} ({TOLERANCES[precision]:g} of the largest, {scale:.3g})"
        )
