"""Strategies: one device; one process a device (DDP, or our own exchange); DataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nfold.frameworks.base import Task
from nfold.frameworks.left_out import ActiveVariant
from nfold.frameworks.torch import ablate_exchange
from nfold.frameworks.torch.bucket_size import MAX_BUCKET_BYTES, measure_bucket_bytes
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.exchange import GradientExchange
from nfold.frameworks.torch.share import BatchShare, CurrentShare

MicroBatchContext = Callable[[BatchShare], AbstractContextManager[None]]
"""The context of a part of a step, forward and backward, by its share."""
GRADIENT_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
"""What gradients are sent as, by the plan's ``exchange``; None: as they are."""
_DDP_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
NO_BUFFER_SYNC: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in _DDP_PARAMETERS
    else {"broadcast_buffers": False}
)
"""The option's name from torch 2.13 on, and before."""


@contextmanager
def process_group(task: Task, devices: Devices) -> Iterator[None]:
    """Join the process group of the run, where there are several processes."""
    if task.world_size == 1:
        yield
        return
    backend = "nccl" if devices.is_cuda else "gloo"
    device = devices.primary if devices.is_cuda else None
    dist.init_process_group(backend, device_id=device)
    yield
    dist.destroy_process_group()


def wrap_model(
    module: nn.Module,
    task: Task,
    devices: Devices,
    current_share: CurrentShare,
    optimizer: torch.optim.Optimizer,
    pieces: tuple[nn.Module, ...],
    active_variant: ActiveVariant,
) -> nn.Module:
    """The module as the plan's strategy runs it; gradients after backward are the ranks' mean.

    Our own exchange begins a bucket of its own for every one of its ``pieces``. Compiled ones
    give all of their gradients at once, which then travel together.

    DDP does not broadcast buffers before every forward: batch-norm statistics are each
    device's own while training (they are averaged before an evaluation).
    """
    if task.plan.strategy == "dp":
        return DataParallel(module, device_ids=list(devices.all))
    if task.world_size == 1:
        return module
    wire = GRADIENT_DTYPES[task.plan.exchange]
    if task.plan.strategy == "nfold":
        _add_gradient_exchange(task, devices, current_share, optimizer, pieces, active_variant)
        return module
    model = DistributedDataParallel(
        module,
        device_ids=[devices.primary] if devices.is_cuda else None,
        gradient_as_bucket_view=True,
        **NO_BUFFER_SYNC,
    )
    hook = ablate_exchange.select_ddp_hook(
        active_variant, None if wire is None else bf16_compress_hook
    )
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def _add_gradient_exchange(
    task: Task,
    devices: Devices,
    current_share: CurrentShare,
    optimizer: torch.optim.Optimizer,
    pieces: tuple[nn.Module, ...],
    active_variant: ActiveVariant,
) -> None:
    """Have gradients exchanged in every backward; the module itself stays as it is.

    In a graph, where a second step of the optimizer costs the host nothing, it runs beside the
    last bucket's way; of an optimizer that is not torch's nobody knows whether it may.
    """
    step, world_size = str(task.plan.step), task.world_size
    compiled = "compiled" in step
    exchange = GradientExchange(
        [piece.parameters() for piece in pieces],
        world_size,
        current_share,
        payload_dtype=GRADIENT_DTYPES[task.plan.exchange],
        bucket_bytes=MAX_BUCKET_BYTES
        if compiled
        else measure_bucket_bytes(devices.primary, world_size),
        single_bucket=compiled,
        all_reduce=ablate_exchange.select_all_reduce(active_variant),
    )
    torchs = type(optimizer).__module__.startswith("torch.optim.")
    if "captured" in step and task.plan.precision != "fp16" and torchs:
        exchange.overlap_optimizer(optimizer)


def micro_batch_context(model: nn.Module, current_share: CurrentShare) -> MicroBatchContext:
    """Lets the ledger know which part of a step comes, and DDP exchange in the last one only."""

    def turn(share: BatchShare) -> AbstractContextManager[None]:
        current_share.set(share)
        if isinstance(model, DistributedDataParallel) and not share.is_last:
            quiet: AbstractContextManager[None] = model.no_sync()
            return quiet
        return nullcontext()

    return turn


def average_buffers(module: nn.Module, world_size: int) -> None:
    """Give every rank the mean of all ranks' floating-point buffers (batch-norm statistics)."""
    if world_size == 1:
        return
    for buffer in module.buffers():
        if buffer.is_floating_point():
            apply_in_place(buffer, lambda whole: _average(whole, world_size))


def _average(values: Tensor, world_size: int) -> None:
    dist.all_reduce(values)
    values /= world_size


def apply_in_place(tensor: Tensor, collective: Callable[[Tensor], object]) -> None:
    """Have a collective change a tensor, however it lies in memory.

    One that is told of a tensor with gaps, or with an axis that was expanded, writes into what
    lies between its numbers or behind them, with gloo even without an error.
    """
    once = tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
    own = tensor.detach()[once]
    whole = own.contiguous()
    if whole.numel():
        collective(torch.view_as_real(whole) if whole.is_complex() else whole)
    if whole.data_ptr() != own.data_ptr():
        own.copy_(whole)


def all_reduce_sum(values: Tensor, world_size: int) -> Tensor:
    """The sum of a tensor over all ranks, on every rank."""
    if world_size > 1:
        dist.all_reduce(values)
    return values


def all_reduce_min(value: int, world_size: int, device: torch.device) -> int:
    """The smallest of all ranks' values, on every rank."""
    if world_size == 1:
        return value
    least = torch.tensor(value, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def barrier(world_size: int) -> None:
    """Wait until every rank is here."""
    if world_size > 1:
        dist.barrier(device_ids=[torch.cuda.current_device()] if _on_cuda() else None)


def _on_cuda() -> bool:
    return dist.get_backend() == "nccl"
