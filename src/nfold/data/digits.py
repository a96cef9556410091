"""Digits: the 1,797 real 8 × 8 images that scikit-learn ships. Needs no file and no network.

E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (UCI, 1998), its test
part. 1,437 images train and 360 test, split by a fixed permutation.
"""

from __future__ import annotations

import hashlib

import numpy as np

from nfold.data.arrays import Arrays, assembled
from nfold.data.forms import DataSet, Form, Paths
from nfold.errors import DataCorrupt

TRAIN = 1437
CLASSES = 10
SHA256 = "40baa6c80220a1156fd9ca6cfae90bef42909fec38f40c91a4554f542b62fcfc"
"""Of all images and then all labels, a byte each, in the order of the split."""


def decode(_: Paths) -> Arrays:
    """Scale 0 to 16 to 0 to 255 and split; DataCorrupt where scikit-learn ships other digits."""
    import sklearn.datasets

    digits = sklearn.datasets.load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int64)
    # A multiplicative walk visits every image once: a shuffle that no library version changes.
    order = (np.arange(len(labels)) * 1009) % len(labels)
    images, labels = images[order], labels[order]
    found = hashlib.sha256(images.tobytes() + labels.astype(np.uint8).tobytes()).hexdigest()
    if found != SHA256:
        raise DataCorrupt(
            f"digits of {sklearn.datasets.__file__}: SHA-256 is {found}, expected {SHA256}; "
            "next: install scikit-learn again"
        )
    train, test = (images[:TRAIN], labels[:TRAIN]), (images[TRAIN:], labels[TRAIN:])
    return assembled("digits", CLASSES, train=train, test=test)


DATA_SET = DataSet(
    name="digits",
    forms=(Form(title="shipped with scikit-learn", files={}, decode=decode),),
    get="pip install scikit-learn",
)
