"""Strategies: one device, one process a device (DDP), one process for all (DataParallel)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nfold.frameworks.base import Task
from nfold.frameworks.torch.devices import Devices


@contextmanager
def joined(task: Task, devices: Devices) -> Iterator[None]:
    """Join the process group of the run, where there are several processes."""
    if task.world_size == 1:
        yield
        return
    backend = "nccl" if devices.cuda else "gloo"
    device = devices.primary if devices.cuda else None
    dist.init_process_group(backend, device_id=device)
    yield
    dist.destroy_process_group()


def wrapped(module: nn.Module, task: Task, devices: Devices) -> nn.Module:
    """The module as the plan's strategy runs it.

    DDP does not broadcast buffers before every forward: batch-norm statistics are each
    device's own while training (they are averaged before an evaluation).
    """
    if task.plan.strategy == "dp":
        return DataParallel(module, device_ids=list(devices.all))
    if task.world_size == 1:
        return module
    return DistributedDataParallel(
        module,
        device_ids=[devices.primary] if devices.cuda else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )


def average_buffers(module: nn.Module, world_size: int) -> None:
    """Give every rank the mean of all ranks' floating-point buffers (batch-norm statistics)."""
    if world_size == 1:
        return
    for buffer in module.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= world_size


def summed(values: Tensor, world_size: int) -> Tensor:
    """The sum of a tensor over all ranks, on every rank."""
    if world_size > 1:
        dist.all_reduce(values)
    return values


def barrier(world_size: int) -> None:
    """Wait until every rank is here."""
    if world_size > 1:
        dist.barrier(device_ids=[torch.cuda.current_device()] if _on_cuda() else None)


def _on_cuda() -> bool:
    return dist.get_backend() == "nccl"
