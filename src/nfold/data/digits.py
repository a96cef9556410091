"""Digits: the 1,797 real 8 × 8 images that scikit-learn ships. Needs no file and no network.

E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (UCI, 1998), its test
part. 1,437 images train and 360 test, split by a fixed permutation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from nfold.data.arrays import Arrays, channel_statistics
from nfold.data.forms import DataSet, Form

TRAIN = 1437


def decode(_: Mapping[str, Path]) -> Arrays:
    """Scale 0 to 16 to 0 to 255 and split."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int64)
    # A multiplicative walk visits every image once: a shuffle that no library version changes.
    order = (np.arange(len(labels)) * 1009) % len(labels)
    images, labels = images[order], labels[order]
    mean, std = channel_statistics(images[:TRAIN])
    return Arrays(
        name="digits",
        classes=10,
        train_images=images[:TRAIN],
        train_labels=labels[:TRAIN],
        test_images=images[TRAIN:],
        test_labels=labels[TRAIN:],
        mean=mean,
        std=std,
    )


DATA_SET = DataSet(
    name="digits",
    forms=(Form(title="shipped with scikit-learn", files={}, decode=decode),),
    get="pip install scikit-learn",
)
