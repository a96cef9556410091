"""A decoded data set as arrays in memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nfold.core.errors import DataCorrupt

Array = npt.NDArray[Any]
Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Split = tuple[Images, Labels]  # images [n, height, width, channels] and their labels [n]


@dataclass(frozen=True, kw_only=True)
class DataSetArrays:
    """Images as uint8 [n, height, width, channels] and labels as int64 [n], 0 to classes - 1.

    ``mean`` and ``std`` are per channel over the training images, on the scale 0 to 255. The
    arrays may be memory maps and are read-only. A user's workload may have arrays of any dtype
    and shape [n, ...]; an empty ``mean`` means that they are not images.
    """

    name: str
    classes: int
    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array
    mean: tuple[float, ...]
    std: tuple[float, ...]


def assemble(name: str, classes: int, *, train: Split, test: Split) -> DataSetArrays:
    """Build a data set and compute the channel statistics of its training images."""
    mean, std = channel_statistics(train[0])
    return DataSetArrays(
        name=name,
        classes=classes,
        train_images=train[0],
        train_labels=train[1],
        test_images=test[0],
        test_labels=test[1],
        mean=mean,
        std=std,
    )


def split_at(
    name: str, classes: int, images: Images, labels: Labels, train_count: int
) -> DataSetArrays:
    """Split into the first ``train_count`` samples for training and the others for testing."""
    train = images[:train_count], labels[:train_count]
    test = images[train_count:], labels[train_count:]
    return assemble(name, classes, train=train, test=test)


def limit_training(arrays: DataSetArrays, samples: int) -> DataSetArrays:
    """Keep only the first ``samples`` training samples; 0 keeps all."""
    return _limit(arrays, ("train_images", "train_labels"), samples)


def limit_test(arrays: DataSetArrays, samples: int) -> DataSetArrays:
    """Keep only the first ``samples`` test samples; 0 keeps all."""
    return _limit(arrays, ("test_images", "test_labels"), samples)


def _limit(arrays: DataSetArrays, names: tuple[str, str], samples: int) -> DataSetArrays:
    limited: dict[str, Any] = {name: getattr(arrays, name)[:samples] for name in names}
    return dataclasses.replace(arrays, **limited) if samples else arrays


def check_labels(path: Path, labels: npt.NDArray[np.integer], classes: int) -> None:
    """Raise DataCorrupt for the first label outside 0 to ``classes`` - 1."""
    row = first_invalid_label(labels, classes)
    if row is not None:
        raise DataCorrupt(f"{path}: row {row} has the label {labels[row]}, not 0 to {classes - 1}")


def first_invalid_label(labels: npt.NDArray[np.integer], classes: int) -> int | None:
    """Return the index of the first label outside 0 to ``classes`` - 1, or None."""
    invalid = np.flatnonzero((labels < 0) | (labels >= classes))
    return int(invalid[0]) if len(invalid) else None


def channel_statistics(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of images [n, h, w, c]."""
    counts = [np.bincount(images[..., c].ravel(), minlength=256) for c in range(images.shape[-1])]
    levels = np.arange(256)
    means = [float((levels * n).sum() / n.sum()) for n in counts]
    squares = [float((levels**2 * n).sum() / n.sum()) for n in counts]
    pairs = zip(squares, means, strict=True)
    return tuple(means), tuple(float(np.sqrt(s - m * m)) for s, m in pairs)
