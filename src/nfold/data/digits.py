"""Digits: 1,797 scanned 8 × 8 images that are shipped with nfold.

The test set of E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (UCI, 1998),
split into 1,437 training and 360 test images. The licence is in ``LICENSE-digits.md``.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from pathlib import Path

import numpy as np

from nfold.core.errors import DataCorrupt
from nfold.data.arrays import DataSetArrays, split_at
from nfold.data.files import DataSetFormat, DataSetSpec, Paths

# images uint8 [1797, 8, 8] with values 0 to 16, labels uint8 [1797]
FILE = Path(__file__).with_name("digits.npz")
TRAIN_COUNT = 1437
CLASSES = 10
# of all images, then all labels, in the order of the split
SHA256 = "40baa6c80220a1156fd9ca6cfae90bef42909fec38f40c91a4554f542b62fcfc"

UNREADABLE = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)
REINSTALL = "pip install --force-reinstall --no-deps nfold"


def decode(_: Paths) -> DataSetArrays:
    """Scale 0 to 16 to 0 to 255 and split; raises DataCorrupt if the file is damaged."""
    try:
        with np.load(FILE) as stored:
            levels, labels = stored["images"], stored["labels"].astype(np.int64)
    except UNREADABLE as error:
        raise DataCorrupt(f"{FILE}: {error}; next: {REINSTALL}") from error
    images = np.round(levels * (255 / 16)).astype(np.uint8)[..., None]
    # A permutation that does not depend on the version of a library: 1009 and 1797 are coprime.
    order = (np.arange(len(labels)) * 1009) % len(labels)
    images, labels = images[order], labels[order]
    digest = hashlib.sha256(images.tobytes() + labels.astype(np.uint8).tobytes()).hexdigest()
    if digest != SHA256:
        raise DataCorrupt(
            f"{FILE}: SHA-256 of the digits is {digest}, expected {SHA256}; next: {REINSTALL}"
        )
    return split_at("digits", CLASSES, images, labels, TRAIN_COUNT)


DATA_SET = DataSetSpec(
    name="digits",
    formats=(DataSetFormat(description="shipped with nfold", files={}, decode=decode),),
    instructions=REINSTALL,
)
