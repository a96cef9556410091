"""A workload of one's own: ``nfold train handwriting:digits``, ``handwriting:digits:width=64``."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import nfold


def digits(width: int = 128) -> nfold.Training:
    """Scanned digits, read by two dense layers."""
    found = load_digits()
    images = np.expand_dims(found.images * 15, -1).astype(np.uint8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))
    return nfold.Training(
        model=model,
        train=(images[:1437], found.target[:1437]),
        test=(images[1437:], found.target[1437:]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        augmentation=(("crop", 1),),
        batch=64,
        epochs=10,
    )
