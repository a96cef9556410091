"""Accuracy on the whole test set, each rank taking a share, with exact counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nfold.frameworks.base import Task
from nfold.frameworks.torch import parallel
from nfold.frameworks.torch.definition import TorchWorkload
from nfold.frameworks.torch.images import Normalize
from nfold.frameworks.torch.precision import Precision


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    workload: TorchWorkload,
    normalize: Normalize,
    precision: Precision,
    task: Task,
    report: Callable[[], None],
) -> float | None:
    """The share of test samples that the model classifies right, over all ranks.

    None without a test set, and where its targets are no classes [n] or the model's outputs no
    scores [n, classes].
    """
    arrays = workload.arrays
    n = len(arrays.test_labels)
    if not n or arrays.test_labels.ndim != 1 or arrays.test_labels.dtype.kind != "i":
        return None
    model.eval()
    device = next(model.parameters()).device
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    first, last = task.rank * n // task.world_size, (task.rank + 1) * n // task.world_size
    for start in range(first, last, workload.evaluation_batch):
        chosen = slice(start, min(start + workload.evaluation_batch, last))
        samples = torch.from_numpy(arrays.test_images[chosen].copy())
        labels = torch.from_numpy(arrays.test_labels[chosen].copy()).to(device)
        with precision.forward():
            outputs = model(normalize(samples))
        if _are_scores(outputs, len(labels)):
            right = (outputs.argmax(dim=1) == labels).sum()
            counts += torch.stack([right, torch.full_like(right, len(labels))])
        report()
    right, scored = parallel.all_reduce_sum(counts, task.world_size).tolist()
    return right / n if scored == n else None


def _are_scores(outputs: Any, samples: int) -> bool:
    return (
        isinstance(outputs, Tensor)
        and outputs.dim() == 2
        and samples == len(outputs)
        and (outputs.shape[1] > 1)
    )
