"""The arrays of the convolution: images, filters, and who gets which images. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt
from scipy import signal

from nfold.core.errors import Mismatch
from nfold.core.plan import Plan

Array = npt.NDArray[np.float32]

RANDOM_FILTER_SEED = 1


@dataclass(frozen=True, kw_only=True)
class ConvProblem:
    """``images`` images of ``channels`` × ``size`` × ``size``, and a square filter of ``filter``.

    Every result channel is the sum over the input channels of their convolutions, each with a
    filter of its own: filters are [channels out, channels in, filter, filter].
    """

    images: int
    channels: int
    size: int
    filter: int
    copy_only: bool
    seed: int

    @classmethod
    def of(cls, parameters: Mapping[str, int], plan: Plan) -> ConvProblem:
        """The problem that a complete plan poses: its batch is the number of images."""
        assert plan.batch is not None
        return cls(
            images=plan.batch,
            channels=parameters["channels"],
            size=parameters["size"],
            filter=parameters["filter"],
            copy_only=bool(parameters["copy_only"]),
            seed=plan.seed,
        )

    def images_of_device(self, index: int, count: int) -> range:
        """The images of device ``index`` of ``count``: shares differ by one image at most."""
        return range(index * self.images // count, (index + 1) * self.images // count)

    def images_of_rank(self, rank: int, world_size: int, devices: int) -> list[range]:
        """The images of each of the ``devices`` of one rank: consecutive shares."""
        first, count = rank * devices, world_size * devices
        return [self.images_of_device(index, count) for index in range(first, first + devices)]

    def value_count(self, images: int) -> int:
        """Values in so many images, and as many in their results."""
        return images * self.channels * self.size**2

    def make_images(self, indices: Sequence[int]) -> Array:
        """Images [n, channels, size, size], uniform in [0, 1).

        An image depends on the seed and its own index alone, so that any split over devices
        convolves the same images.
        """
        shape = (self.channels, self.size, self.size)
        made = np.empty((len(indices), *shape), np.float32)
        for image, index in zip(made, indices, strict=True):
            np.random.default_rng([self.seed, index]).random(dtype=np.float32, out=image)
        return made

    def ones_filter(self) -> Array:
        """The timed filters: ones."""
        shape = (self.channels, self.channels, self.filter, self.filter)
        return np.ones(shape, np.float32)

    def mean_filter(self) -> Array:
        """Ones scaled to a sum of one per result, so that a chain of convolutions stays finite."""
        return self.ones_filter() / np.float32(self.channels * self.filter**2)

    def random_filter(self) -> Array:
        """Random filters that tell convolution from correlation and left from right.

        Eighths between -1 and 1: every precision holds them exactly.
        """
        drawn = np.random.default_rng(RANDOM_FILTER_SEED).integers(-8, 9, self.ones_filter().shape)
        return (drawn / 8).astype(np.float32)


def to_correlation(filters: Array) -> Array:
    """The filters whose correlation, which is what libraries compute, is these's convolution."""
    return filters[..., ::-1, ::-1].copy()


AnyFloat = npt.NDArray[np.floating]

# The largest difference allowed, relative to the largest value of the reference.
#
# A few units in the last place of each format (24, 11, 8 and 11 significant bits), with room for
# the error of Winograd's algorithm (Lavin and Gray, CVPR 2016). fp32's bound also finds tf32 where
# it was not asked for: rounding images to 11 bits makes 2.3e-4 and more with random filters.
TOLERANCES: dict[str, float] = {"fp32": 5e-5, "tf32": 5e-3, "bf16": 2e-2, "fp16": 5e-3}


def convolve_image(image: AnyFloat, filters: AnyFloat) -> AnyFloat:
    """scipy's ``same`` convolution of [channels in, h, w], summed over input channels.

    ``filters`` is [channels out, channels in, k, k]; the result is [channels out, h, w].
    """
    return np.stack([_convolve_channels(image, per_channel) for per_channel in filters])


def _convolve_channels(image: AnyFloat, filters: AnyFloat) -> AnyFloat:
    pairs = zip(image, filters, strict=True)
    return reduce(np.add, [signal.convolve2d(x, f, mode="same") for x, f in pairs])


def scipy_reference(images: AnyFloat, filters: AnyFloat) -> npt.NDArray[np.float64]:
    """The convolution of images [n, channels, h, w] by scipy in double precision."""
    wide = filters.astype(np.float64)
    return np.stack([convolve_image(image.astype(np.float64), wide) for image in images])


def spot_check_indices(count: int) -> list[int]:
    """The places of a handful of images out of ``count``: first, middle and last."""
    return sorted({0, count // 2, count - 1}) if count else []


def check_result(
    result: AnyFloat, expected: AnyFloat, images: Sequence[int], precision: str
) -> None:
    """Raise Mismatch where a result [n, ...] is not the expected one, NaN and Inf included.

    ``images`` are the indices to name in the message. Differences are relative to the largest
    expected value of all, because a sum of many products rounds in units of its largest.
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
