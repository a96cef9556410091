"""Accuracy on the whole test set, each rank taking a share, with exact counts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from nfold.data.arrays import Arrays
from nfold.frameworks.base import Task
from nfold.frameworks.torch import parallel
from nfold.frameworks.torch.images import Normalizer
from nfold.frameworks.torch.precision import Precision

BATCH = 500


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    arrays: Arrays,
    normalize: Normalizer,
    precision: Precision,
    task: Task,
    beat: Callable[[], None],
) -> float:
    """The share of test images that the model classifies right, over all ranks."""
    model.eval()
    device = next(model.parameters()).device
    right = torch.zeros((), dtype=torch.int64, device=device)
    n = len(arrays.test_labels)
    first, last = task.rank * n // task.world_size, (task.rank + 1) * n // task.world_size
    for start in range(first, last, BATCH):
        chosen = slice(start, min(start + BATCH, last))
        images = torch.from_numpy(arrays.test_images[chosen].copy())
        labels = torch.from_numpy(arrays.test_labels[chosen].copy()).to(device)
        with precision.forward():
            predicted = model(normalize(images)).argmax(dim=1)
        right += (predicted == labels).sum()
        beat()
    return float(parallel.summed(right, task.world_size).item()) / n
