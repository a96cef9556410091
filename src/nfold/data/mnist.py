"""MNIST as IDX files (LeCun, Cortes, Burges, 1998), gzipped or not.

If only the 10,000 test images are available, the first 9,000 are the training set and the others
the test set. This data set is called ``mnist-9000``, because its accuracy is not MNIST's.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nfold.core.errors import DataCorrupt
from nfold.data.arrays import DataSetArrays, Split, assemble, check_labels, split_at
from nfold.data.files import DataSetFormat, DataSetSpec, DownloadFile, Paths, read_content

TEST_FILES = {
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
TRAIN_FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
}
TRAIN_COUNT, TEST_COUNT, SPLIT_COUNT = 60_000, 10_000, 9_000
SIDE = 28
CLASSES = 10

GZIP_SIZES = (9_912_422, 28_881, 1_648_877, 4_542)
GZIP_SHA256 = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
DOWNLOADS = tuple(
    DownloadFile(
        url=f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz",
        size_bytes=size_bytes,
        sha256=sha256,
    )
    for (name, sha256), size_bytes in zip(GZIP_SHA256.items(), GZIP_SIZES, strict=True)
)


def read_idx(path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Read an IDX file of bytes with this shape.

    The header is 0, 0, type 8, the number of axes and their lengths. Raises DataCorrupt for
    another header or length.
    """
    header = bytes((0, 0, 8, len(shape))) + b"".join(n.to_bytes(4) for n in shape)
    raw = read_content(path, len(header) + math.prod(shape))
    if not raw.startswith(header):
        raise DataCorrupt(
            f"{path}: header is {raw[: len(header)].hex()}, expected {header.hex()} (an IDX file "
            f"of {' × '.join(map(str, shape))} bytes); next: get the file again"
        )
    return np.frombuffer(raw, np.uint8, offset=len(header)).reshape(shape)


def _read_split(paths: Paths, files: dict[str, str], count: int) -> Split:
    (images_path,), (labels_path,) = (paths[name] for name in files)
    labels = read_idx(labels_path, (count,))
    check_labels(labels_path, labels, CLASSES)
    images = read_idx(images_path, (count, SIDE, SIDE))
    return images[..., None], labels.astype(np.int64)


def _decode_full(paths: Paths) -> DataSetArrays:
    train = _read_split(paths, TRAIN_FILES, TRAIN_COUNT)
    test = _read_split(paths, TEST_FILES, TEST_COUNT)
    return assemble("mnist", CLASSES, train=train, test=test)


def _decode_split(paths: Paths) -> DataSetArrays:
    images, labels = _read_split(paths, TEST_FILES, TEST_COUNT)
    return split_at("mnist-9000", CLASSES, images, labels, SPLIT_COUNT)


DATA_SET = DataSetSpec(
    name="mnist",
    formats=(
        DataSetFormat(
            description="60,000 + 10,000", files=TRAIN_FILES | TEST_FILES, decode=_decode_full
        ),
        DataSetFormat(
            description="the 10,000 alone, split", files=TEST_FILES, decode=_decode_split
        ),
    ),
    instructions="put MNIST's IDX files (also as .gz) into a folder and set NFOLD_DATA to it",
    downloads=DOWNLOADS,
    subfolders=("raw",),
)
