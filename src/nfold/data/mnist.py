"""MNIST in its own IDX form (LeCun, Cortes, Burges, 1998), gzipped or not.

With only the 10,000 test images at hand, the first 9,000 train and the last 1,000 test, and the
set is called ``mnist-9000`` so that nobody takes its accuracy for MNIST's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nfold.data.arrays import Arrays, channel_statistics
from nfold.data.forms import DataSet, Form, content
from nfold.errors import DataCorrupt

TEST_FILES = {
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
TRAIN_FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
}
SPLIT = 9000


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array in an IDX file of bytes; DataCorrupt where header and length disagree."""
    raw = content(path)
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise DataCorrupt(f"{path}: not an IDX file of bytes; next: get the file again")
    start = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i]) for i in range(raw[3])]
    if len(raw) != start + int(np.prod(shape)):
        raise DataCorrupt(
            f"{path}: {len(raw)} bytes, its header announces {shape}; next: get the file again"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _decode_whole(paths: Mapping[str, Path]) -> Arrays:
    train = [read_idx(paths[name]) for name in TRAIN_FILES]
    test = [read_idx(paths[name]) for name in TEST_FILES]
    return _arrays("mnist", train[0], train[1], test[0], test[1])


def _decode_split(paths: Mapping[str, Path]) -> Arrays:
    images, labels = (read_idx(paths[name]) for name in TEST_FILES)
    return _arrays("mnist-9000", images[:SPLIT], labels[:SPLIT], images[SPLIT:], labels[SPLIT:])


def _arrays(
    name: str,
    train_images: npt.NDArray[np.uint8],
    train_labels: npt.NDArray[np.uint8],
    test_images: npt.NDArray[np.uint8],
    test_labels: npt.NDArray[np.uint8],
) -> Arrays:
    mean, std = channel_statistics(train_images[..., None])
    return Arrays(
        name=name,
        classes=10,
        train_images=train_images[..., None],
        train_labels=train_labels.astype(np.int64),
        test_images=test_images[..., None],
        test_labels=test_labels.astype(np.int64),
        mean=mean,
        std=std,
    )


DATA_SET = DataSet(
    name="mnist",
    forms=(
        Form(title="60,000 + 10,000", files=TRAIN_FILES | TEST_FILES, decode=_decode_whole),
        Form(title="the 10,000 alone, split", files=TEST_FILES, decode=_decode_split),
    ),
    get="put MNIST's IDX files (plain or .gz) into a folder and set NFOLD_DATA to it",
)
