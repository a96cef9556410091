"""What the PyTorch arms share: nfold's own models, losses and optimizers, devices and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from job import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from turns import Stop, Turns

from nfold.engines.torch.communication import data_parallel
from nfold.engines.torch.devices import Devices
from nfold.workloads import network


@dataclass(frozen=True)
class Training:
    """A workload's model on its device, its optimizer and its loss."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]


def opened(job: Job) -> Devices:
    """The devices that this rank drives, the first one current."""
    if job.device == "cpu":
        return Devices((torch.device("cpu"),))
    indices = range(job.local_rank, job.local_rank + job.devices)
    devices = Devices(tuple(torch.device("cuda", index) for index in indices))
    torch.cuda.set_device(devices.primary)
    return devices


@contextmanager
def joined(job: Job, devices: Devices, *, leave: bool = True) -> Iterator[None]:
    """In the process group of the arm's ranks, where there are several.

    Without ``leave`` the group ends with the process: leaving it hangs while a CUDA graph that
    captured its exchange is alive.
    """
    if job.world_size == 1:
        yield
        return
    backend = "nccl" if devices.is_cuda else "gloo"
    dist.init_process_group(backend, device_id=devices.primary if devices.is_cuda else None)
    try:
        yield
    except Stop:
        if leave:
            dist.destroy_process_group()
        raise


def built(job: Job, device: torch.device, *, channels_last: bool = True) -> Training:
    """The workload's training; the same weights on every rank."""
    definition = network(job.workload.name, "torch")
    torch.manual_seed(0)
    module: nn.Module = definition.model(job.parameters, job.arrays().classes).to(device)
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
    torch.manual_seed(1 + job.rank)
    return Training(module, definition.optimizer(module, job.parameters), definition.loss)


def in_parallel(module: nn.Module, job: Job, device: torch.device, **options: bool) -> nn.Module:
    """The module under DDP where there are several ranks, buffers each rank's own."""
    if job.world_size == 1:
        return module
    return DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        **in_parallel_options(),
        **options,
    )


def in_parallel_options() -> dict[str, Any]:
    """DDP's options that every careful arm sets."""
    return {"gradient_as_bucket_view": True, **data_parallel.NO_BUFFER_SYNC}


def bf16(device: torch.device) -> AbstractContextManager[None]:
    """A forward pass in bf16 where that is safe, on GPUs: many CPUs would emulate it."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def turns_of(job: Job, devices: Devices, *, queued_steps: int = 0, warmup: int = 0) -> Turns:
    """The turns of this rank, after at least ``warmup`` steps."""
    return Turns(
        job.channel,
        job.batch,
        fence=devices.synchronize,
        barrier=lambda: data_parallel.barrier(job.world_size),
        peak_memory_bytes=devices.peak_memory_bytes,
        warmup=max(job.warmup, warmup),
        queued_steps=queued_steps,
    )
