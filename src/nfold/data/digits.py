"""Digits: 1,797 scanned 8 × 8 images that are part of this package. Needs no network.

E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (UCI, 1998), its test
part. 1,437 images train and 360 test, split by a fixed permutation. The licence is in
``LICENSE-digits.md``.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from pathlib import Path

import numpy as np

from nfold.core.errors import DataCorrupt
from nfold.data.arrays import DataSetArrays, assemble
from nfold.data.files import DataSetFormat, DataSetSpec, Paths

FILE = Path(__file__).with_name("digits.npz")
"""``images`` uint8 [1797, 8, 8] with values 0 to 16, ``labels`` uint8 [1797]."""
TRAIN_COUNT = 1437
CLASSES = 10
SHA256 = "40baa6c80220a1156fd9ca6cfae90bef42909fec38f40c91a4554f542b62fcfc"
"""Of all images and then all labels, a byte each, in the order of the split."""

UNREADABLE = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)
REINSTALL = "pip install --force-reinstall --no-deps nfold"


def decode(_: Paths) -> DataSetArrays:
    """Scale 0 to 16 to 0 to 255 and split; DataCorrupt where the package's file is damaged."""
    try:
        with np.load(FILE) as stored:
            levels, labels = stored["images"], stored["labels"].astype(np.int64)
    except UNREADABLE as error:
        raise DataCorrupt(f"{FILE}: {error}; next: {REINSTALL}") from error
    images = np.round(levels * (255 / 16)).astype(np.uint8)[..., None]
    # A multiplicative walk visits every image once: a shuffle that no library version changes.
    order = (np.arange(len(labels)) * 1009) % len(labels)
    images, labels = images[order], labels[order]
    found = hashlib.sha256(images.tobytes() + labels.astype(np.uint8).tobytes()).hexdigest()
    if found != SHA256:
        raise DataCorrupt(
            f"{FILE}: SHA-256 of the digits is {found}, expected {SHA256}; next: {REINSTALL}"
        )
    train, test = (
        (images[:TRAIN_COUNT], labels[:TRAIN_COUNT]),
        (images[TRAIN_COUNT:], labels[TRAIN_COUNT:]),
    )
    return assemble("digits", CLASSES, train=train, test=test)


DATA_SET = DataSetSpec(
    name="digits",
    formats=(DataSetFormat(description="shipped with nfold", files={}, decode=decode),),
    instructions=REINSTALL,
)
