"""The arrays of the convolution: images, filters, and who gets which images. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nfold.plan import Plan

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
