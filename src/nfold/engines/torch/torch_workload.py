"""The data, model, loss and optimizer of a workload: built in, or from a user's function."""

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
from nfold.data.arrays import DataSetArrays, channel_statistics
from nfold.data.photographs import PhotographSet
from nfold.engines.base import Task
from nfold.engines.builtin_workloads import load_builtin_samples
from nfold.engines.torch.input.batch_source import Operations
from nfold.workloads import torch_networks as torch_workloads
from nfold.workloads import user_workload

EVALUATION_BATCH = 500  # test samples per forward pass of a built-in workload
COMPARED_SAMPLES = 64  # samples that ranks compare, evenly spaced


@dataclass(frozen=True, kw_only=True)
class TorchWorkload:
    """A workload in PyTorch. ``model`` has the initial weights of every rank.

    ``optimizer`` is called with the model on its device. ``peak_lr`` is the peak of the one-cycle
    schedule; 0 keeps the learning rate constant. An evaluation takes ``evaluation_batch`` samples per
    forward pass. ``photographs`` are samples in files: ``arrays`` then holds their labels, no images.
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
    """Return the task's workload, equal on every rank: random state is seeded first."""
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
    workload = user_workload.call_user_workload(task.workload)
    training = workload.training
    if not isinstance(training.model, nn.Module):
        kind = type(training.model).__name__
        raise UsageError(f"{task.workload}: model is {kind}; allowed is a torch.nn.Module")
    return TorchWorkload(
        arrays=_own_arrays(workload, task.workload.name),
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


def _build_optimizer(build: Callable[[Any], Any], model: nn.Module) -> torch.optim.Optimizer:
    optimizer = build(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer returned {type(optimizer).__name__}; allowed is a torch.optim.Optimizer"
        )
    return optimizer


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in float32 of class numbers [n] or probabilities [n, classes]."""
    classes = not (targets.is_floating_point() or targets.is_complex())
    return torch_workloads.cross_entropy(outputs, targets.long() if classes else targets)


def _mean_loss(loss: Callable[[Any, Any], Any], outputs: Any, targets: Tensor) -> Tensor:
    value = loss(outputs, targets)
    if not isinstance(value, Tensor) or value.dim():
        kind = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"loss returned {kind}; allowed is the mean over the samples, a tensor []")
    return value


def check_ranks_agree(workload: TorchWorkload, task: Task, device: torch.device) -> None:
    """Raise UsageError if ranks made different data or weights of a user's own workload."""
    if task.world_size == 1 or task.workload.function_reference is None:
        return
    digest = hashlib.sha256()
    arrays = workload.arrays
    for array in (arrays.train_images, arrays.train_labels, arrays.test_images):
        rows = np.linspace(0, len(array) - 1, min(len(array), COMPARED_SAMPLES)).astype(np.int64)
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array[rows]).tobytes())
    for parameter in workload.model.parameters():
        digest.update(repr(parameter.detach().double().sum().item()).encode())
    number = int.from_bytes(digest.digest()[:7])
    both = torch.tensor([number, -number], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    highest, lowest = both.tolist()
    if highest != -lowest:
        raise UsageError(
            f"{task.workload} made different data or weights on different ranks; next: seed its "
            "random generators (nfold seeds torch, numpy.random and random before calling it)"
        )
