"""Random crop, flip and cutout of a batch on the host, in NumPy: draws of ``torch/augment.py``.

The same pixels as there and as in ``keras/augment.py``; only the library differs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from nfold.data.arrays import DataSetArrays, Images
from nfold.frameworks.philox import Ids, Words, draws, uniform_int

OPERATION_KEYS: dict[str, int] = {"crop": 1, "flip": 2, "cutout": 3}
"""What tells the draws of operations apart. They never change: results depend on them."""

Operations = tuple[tuple[str, int], ...]
Draws = list[Words]
Augment = Callable[[Images, Ids, int], Images]
"""Images [n, h, w, c], the ids [n] of their samples and the epoch to augmented images."""


def build_augmentation(operations: Operations, arrays: DataSetArrays, seed: int) -> Augment:
    """Applies ``operations``, pairs of a name and an argument, in order; none changes nothing."""

    def augment(images: Images, ids: Ids, epoch: int) -> Images:
        for name, argument in operations:
            drawn = draws(seed, epoch, ids, OPERATION_KEYS[name])
            images = AUGMENTATIONS[name](images, drawn, argument, arrays)
        return images

    return augment


def crop(images: Images, draws: Draws, padding: int, _arrays: DataSetArrays) -> Images:
    """Pads with zeros and cuts the size out again, by draws 0 (down) and 1 (right)."""
    n, height, width, _ = images.shape
    places = 2 * padding + 1
    edge = (padding, padding)
    padded = np.pad(images, ((0, 0), edge, edge, (0, 0)))
    rows = uniform_int(draws[0], places)[:, None] + np.arange(height)
    columns = uniform_int(draws[1], places)[:, None] + np.arange(width)
    cut: Images = padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return cut


def flip(images: Images, draws: Draws, _argument: int, _arrays: DataSetArrays) -> Images:
    """Mirrors left to right by the highest bit of draw 0."""
    mirrored = (draws[0] >> np.uint64(31)).astype(bool)
    return np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)


def cutout(images: Images, draws: Draws, size: int, arrays: DataSetArrays) -> Images:
    """Covers a square with the mean, its centre at draws 0 (row) and 1 (column)."""
    _, height, width, _ = images.shape
    square = (
        _covered_positions(draws[0], height, size)[:, :, None]
        & _covered_positions(draws[1], width, size)[:, None, :]
    )
    return np.where(square[..., None], mean_levels(arrays), images)


def _covered_positions(drawn: Words, side: int, size: int) -> npt.NDArray[np.bool_]:
    """Which places [side] lie under each image's square: bool [n, side]."""
    distance = np.arange(side) - (uniform_int(drawn, side) - size // 2)[:, None]
    covered: npt.NDArray[np.bool_] = (distance >= 0) & (distance < size)
    return covered


def mean_levels(arrays: DataSetArrays) -> npt.NDArray[np.uint8]:
    """The training images' mean per channel, to the nearest of 256 levels."""
    return np.array([round(level) for level in arrays.mean], dtype=np.uint8)


AUGMENTATIONS: dict[str, Callable[[Images, Draws, int, DataSetArrays], Images]] = {
    "crop": crop,
    "flip": flip,
    "cutout": cutout,
}
