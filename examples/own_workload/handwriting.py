"""A workload of one's own: ``nfold train handwriting:digits``, ``handwriting:digits:width=64``."""

import torch
from torch import nn

import nfold
from nfold.data.digits import decode


def digits(width: int = 128) -> nfold.Training:
    """Scanned digits, read by two dense layers."""
    found = decode({})
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))
    return nfold.Training(
        model=model,
        train=(found.train_images, found.train_labels),
        test=(found.test_images, found.test_labels),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        augmentation=(("crop", 1),),
        batch=64,
        epochs=10,
    )
