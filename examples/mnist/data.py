"""MNIST from its IDX files in $NFOLD_DATA/mnist: the 10,000 test images, split 9,000 to 1,000."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

FOLDER = Path(os.environ.get("NFOLD_DATA", "data")) / "mnist"
TRAINING = 9000


def read(name: str, header: int) -> torch.Tensor:
    with gzip.open(FOLDER / name) as file:
        return torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=header).copy())


def mnist(samples: int) -> tuple[TensorDataset, TensorDataset]:
    """The first ``samples`` training images and all test images, as floats [n, 1, 28, 28]."""
    images = read("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28) / 255
    labels = read("t10k-labels-idx1-ubyte.gz", 8).long()
    train = slice(0, min(samples, TRAINING))
    return (
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[TRAINING:], labels[TRAINING:]),
    )
