"""The digits that nfold ships."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from nfold.data.digits import decode


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test images [n, 1, 8, 8] with their labels [n]."""
    found = decode({})
    pairs = ((found.train_images, found.train_labels), (found.test_images, found.test_labels))
    train, test = (
        TensorDataset(
            torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1, torch.from_numpy(labels)
        )
        for images, labels in pairs
    )
    return train, test
