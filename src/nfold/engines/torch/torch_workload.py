"""What is trained, apart from how: the data, the model, its loss and its optimizer.

Of a built-in workload its folder says it; of a user's own, the function that it names.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nfold import workloads
from nfold.core.errors import UsageError
from nfold.data.arrays import Array, DataSetArrays, channel_statistics
from nfold.data.photographs import PhotographSet
from nfold.engines.base import Task
from nfold.engines.builtin_workloads import load_builtin_samples
from nfold.engines.torch.input.batch_source import Operations
from nfold.workloads import torch_networks as torch_workloads
from nfold.workloads import user_workload

EVALUATION_BATCH = 500
"""Test samples in one forward pass of a built-in workload."""
COMPARED_SAMPLES = 64
"""Samples that ranks compare, evenly spaced over all."""


@dataclass(frozen=True, kw_only=True)
class TorchWorkload:
    """A workload in PyTorch. ``model`` has the weights that every rank begins with.

    ``optimizer`` is called with the model on its device. ``peak`` is the learning rate's in one
    cycle, 0: fixed. An evaluation takes ``at_once`` samples in a forward pass. ``photographs``
    are the samples where these are files; ``arrays`` then has their labels and no image.
    """

    arrays: DataSetArrays
    operations: Operations
    model: nn.Module
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[Any, Tensor], Tensor]
    peak_lr: float = 0.0
    evaluation_batch: int = EVALUATION_BATCH
    photographs: PhotographSet | None = None


def load_workload(task: Task) -> TorchWorkload:
    """What the task trains, the same on every rank: random state is seeded before it is made."""
    return _load_builtin(task) if task.workload.function_reference is None else _load_own(task)


def _load_builtin(task: Task) -> TorchWorkload:
    info = workloads.info(task.workload.name)
    chosen = workloads.parameters(task.workload)
    arrays, photographs = load_builtin_samples(info, chosen, task.plan)
    module = workloads.network(task.workload.name, "torch")
    torch.manual_seed(task.plan.seed)
    return TorchWorkload(
        arrays=arrays,
        operations=info.augmentation_for(chosen),
        model=module.model(chosen, arrays.classes),
        optimizer=lambda model: module.optimizer(model, chosen),
        loss=module.loss,
        peak_lr=chosen.get("peak", 0) / 1000,
        photographs=photographs,
    )


def _load_own(task: Task) -> TorchWorkload:
    seed = task.plan.seed
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    found = user_workload.call_user_workload(task.workload)
    training = found.training
    if not isinstance(training.model, nn.Module):
        kind = type(training.model).__name__
        raise UsageError(f"{task.workload}: model is {kind}; allowed is a torch.nn.Module")
    return TorchWorkload(
        arrays=_own_arrays(found, task.workload.name),
        operations=training.augmentation,
        model=training.model,
        optimizer=partial(_build_optimizer, training.optimizer),
        loss=cross_entropy if training.loss is None else partial(_mean_loss, training.loss),
        evaluation_batch=min(EVALUATION_BATCH, -(-cast(int, task.plan.batch) // task.world_size)),
    )


def _own_arrays(workload: user_workload.UserWorkload, name: str) -> DataSetArrays:
    train, test = workload.train, workload.test or (workload.train[0][:0], workload.train[1][:0])
    mean, std = channel_statistics(train[0]) if workload.has_images else ((), ())
    return DataSetArrays(
        name=name,
        classes=0,
        train_images=train[0],
        train_labels=train[1],
        test_images=test[0],
        test_labels=test[1],
        mean=mean,
        std=tuple(one or 1.0 for one in std),
    )


def _build_optimizer(make: Callable[[Any], Any], model: nn.Module) -> torch.optim.Optimizer:
    made = make(model)
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer made {type(made).__name__}; allowed is a torch.optim.Optimizer"
        )
    return made


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in float32: classes as whole numbers, or probabilities [n, classes]."""
    whole = not (targets.is_floating_point() or targets.is_complex())
    return torch_workloads.cross_entropy(outputs, targets.long() if whole else targets)


def _mean_loss(loss: Callable[[Any, Any], Any], outputs: Any, targets: Tensor) -> Tensor:
    found = loss(outputs, targets)
    if not isinstance(found, Tensor) or found.dim():
        form = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UsageError(f"loss returned {form}; allowed is the mean over the samples, a tensor []")
    return found


def check_ranks_agree(workload: TorchWorkload, task: Task, device: torch.device) -> None:
    """UsageError where ranks have made different data or weights of a user's own workload."""
    if task.world_size == 1 or task.workload.function_reference is None:
        return
    digest = hashlib.sha256()
    for array in (
        workload.arrays.train_images,
        workload.arrays.train_labels,
        workload.arrays.test_images,
    ):
        digest.update(_rows_to_bytes(array))
    for parameter in workload.model.parameters():
        digest.update(repr(parameter.detach().double().sum().item()).encode())
    number = int.from_bytes(digest.digest()[:7])
    both = torch.tensor([number, -number], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    highest, lowest = both.tolist()
    if highest != -lowest:
        raise UsageError(
            f"{task.workload} made different data or weights on different ranks; next: seed "
            "what it draws (nfold seeds torch, numpy.random and random before it calls it)"
        )


def _rows_to_bytes(array: Array) -> bytes:
    rows = np.linspace(0, len(array) - 1, min(len(array), COMPARED_SAMPLES)).astype(np.int64)
    return repr(array.shape).encode() + np.ascontiguousarray(array[rows]).tobytes()
