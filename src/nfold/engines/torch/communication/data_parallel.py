"""Data parallelism of one rank: process group, strategies, bucket size, reductions, checksums."""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nfold.engines.base import Task
from nfold.engines.interleaver import ActiveVariant
from nfold.engines.recorder import checksum
from nfold.engines.sampling import BatchShare
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.communication import gradient_exchange
from nfold.engines.torch.communication.gradient_exchange import GradientExchange
from nfold.engines.torch.devices import Devices

PROBED_BYTES = (2**16, 2**20, 2**23)
PROBE_REPEATS = 5
LATENCY_FRACTION = 0.1
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES = 2**20, 2**26


@cache
def measure_bucket_bytes(device: torch.device, world_size: int) -> int:
    """Return the bucket size for this process group, equal on all ranks; all ranks must call it.

    An all-reduce of n bytes takes about ``latency + n / bandwidth``. Small buckets start early, but
    each pays the latency. Measured once, in tens of milliseconds.
    """
    if world_size == 1:
        return MAX_BUCKET_BYTES
    seconds = [_time_all_reduce(size, device) for size in PROBED_BYTES]
    chosen = torch.tensor(choose_bucket_bytes(PROBED_BYTES, seconds), device=device)
    dist.broadcast(chosen, src=0)
    return int(chosen.item())


def choose_bucket_bytes(sizes: tuple[int, ...], seconds: list[float]) -> int:
    """Return the bytes at which latency is LATENCY_FRACTION of the time, by a linear fit."""
    slope, latency = statistics.linear_regression(sizes, seconds)
    if slope <= 0:
        return MAX_BUCKET_BYTES
    size = max(0.0, latency) * (1 - LATENCY_FRACTION) / LATENCY_FRACTION / slope
    return round(min(max(size, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES))


def _time_all_reduce(size: int, device: torch.device) -> float:
    values = torch.zeros(size // 4, device=device)
    synchronize = Devices((device,)).synchronize
    taken = []
    for _ in range(PROBE_REPEATS + 1):
        synchronize()
        started = time.perf_counter()
        dist.all_reduce(values)
        synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


# The context of a micro-batch's forward and backward.
MicroBatchContext = Callable[[BatchShare], AbstractContextManager[None]]
# The plan's ``exchange`` to the type that gradients are sent in; None: their own.
GRADIENT_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
_DDP_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
# DDP does not broadcast buffers before every forward: batch-norm statistics belong to each device
# while it trains. The option was renamed in torch 2.13.
NO_BUFFER_SYNC: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in _DDP_PARAMETERS
    else {"broadcast_buffers": False}
)


@contextmanager
def process_group(task: Task, devices: Devices) -> Iterator[None]:
    """Join the process group of a run. One of gloo stays until the process ends.

    The last reference to a gloo group joins its threads while it holds the interpreter lock, for which
    a thread that releases a tensor may wait (docs/decisions/process-launch.md).
    """
    if task.world_size == 1:
        yield
        return
    join_process_group(devices.primary)
    yield
    if dist.get_backend() != "gloo":
        dist.destroy_process_group()


def join_process_group(device: torch.device) -> None:
    cuda = device.type == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)


def wrap_model(
    module: nn.Module,
    task: Task,
    devices: Devices,
    current_share: CurrentShare,
    optimizer: torch.optim.Optimizer,
    pieces: tuple[nn.Module, ...],
    active_variant: ActiveVariant,
) -> nn.Module:
    """Return the module as the plan's strategy runs it.

    After backward, gradients are the mean over the ranks. The exchange begins a new bucket for
    each of ``pieces``; compiled pieces give all their gradients at once, in one bucket.
    """
    if task.plan.strategy == "dp":
        return DataParallel(module, device_ids=list(devices.all))
    if task.world_size == 1:
        return module
    if task.plan.strategy == "nfold":
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
            all_reduce=gradient_exchange.select_all_reduce(active_variant),
        )
        # In a CUDA graph a second optimizer step costs the host nothing, and overlaps with the last
        # bucket. Only torch's optimizers are known to allow it.
        from_torch = type(optimizer).__module__.startswith("torch.optim.")
        if "captured" in step and task.plan.precision != "fp16" and from_torch:
            exchange.overlap_optimizer(optimizer)
        return module
    model = DistributedDataParallel(
        module,
        device_ids=[devices.primary] if devices.is_cuda else None,
        **{"gradient_as_bucket_view": True, **NO_BUFFER_SYNC, **task.variant.ddp_arguments()},
    )
    default_hook = None if GRADIENT_DTYPES[task.plan.exchange] is None else bf16_compress_hook
    hook = gradient_exchange.select_ddp_hook(active_variant, default_hook)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def micro_batch_context(model: nn.Module, current_share: CurrentShare) -> MicroBatchContext:
    """Return a context that sets the current share, and lets DDP exchange in the last one only."""

    def context(share: BatchShare) -> AbstractContextManager[None]:
        current_share.set(share)
        if isinstance(model, DistributedDataParallel) and not share.is_last:
            no_sync: AbstractContextManager[None] = model.no_sync()
            return no_sync
        return nullcontext()

    return context


def average_buffers(module: nn.Module, world_size: int) -> None:
    """Replace floating-point buffers (batch-norm statistics) by their mean over all ranks."""
    if world_size == 1:
        return
    for buffer in module.buffers():
        if buffer.is_floating_point():
            apply_in_place(buffer, lambda whole: _average(whole, world_size))


def _average(values: Tensor, world_size: int) -> None:
    dist.all_reduce(values)
    values /= world_size


def apply_in_place(tensor: Tensor, collective: Callable[[Tensor], object]) -> None:
    """Apply an in-place collective to a tensor of any strides.

    On a tensor with gaps or an expanded axis, a collective writes between or behind its numbers;
    with gloo without an error.
    """
    not_expanded = tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
    own = tensor.detach()[not_expanded]
    dense = own.contiguous()
    if dense.numel():
        collective(torch.view_as_real(dense) if dense.is_complex() else dense)
    if dense.data_ptr() != own.data_ptr():
        own.copy_(dense)


def all_reduce_sum(values: Tensor, world_size: int) -> Tensor:
    if world_size > 1:
        dist.all_reduce(values)
    return values


def all_reduce_min(value: int, world_size: int, device: torch.device) -> int:
    if world_size == 1:
        return value
    least = torch.tensor(value, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def barrier(world_size: int) -> None:
    if world_size > 1:
        on_gpu = dist.get_backend() == "nccl"
        dist.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)


def sum_over_ranks(value: Any, device: torch.device, world_size: int) -> Any:
    """Return the sum over all ranks: of a number, a number of its kind; of a tensor, a tensor."""
    if isinstance(value, Tensor):
        return all_reduce_sum(value.detach().clone().to(device), world_size)
    number = np.asarray(value)
    exact = np.int64 if number.dtype.kind in "biu" else np.float64
    return sum_over_ranks(torch.from_numpy(number.astype(exact)), device, world_size).item()


def weighted_mean(value: Any, count: int, device: torch.device, world_size: int) -> float:
    """Return the mean over all ranks, weighted by ``count``; NaN if all counts are 0."""
    value = value.detach() if isinstance(value, Tensor) else value
    weighted = float(value) * count if count else 0.0  # the value may be NaN
    own = torch.tensor([weighted, count], dtype=torch.float64)
    total, counted = sum_over_ranks(own, device, world_size).tolist()
    return float(total / counted) if counted else math.nan


SAMPLED_VALUES = 64  # numbers that are compared to estimate how much parameters differ


def parameter_checksum(parameters: Iterable[Tensor]) -> str:
    """Return a checksum that is equal for parameters that are equal bit by bit."""
    flat = (parameter.detach().cpu().contiguous().flatten() for parameter in parameters)
    return checksum(values.view(torch.uint8).numpy().tobytes() for values in flat)


def sample_parameters(parameters: Sequence[Tensor]) -> tuple[float, ...]:
    """Return some numbers of as many parameters as possible, the same positions on all ranks.

    Empty if no floating-point parameter has any.
    """
    sampled = [one for one in parameters if one.numel() and one.is_floating_point()]
    sampled = sampled[:: -(-len(sampled) // SAMPLED_VALUES) or 1]
    values: list[float] = []
    for parameter in sampled:
        step = -(-parameter.numel() // -(-SAMPLED_VALUES // len(sampled)))
        values += parameter.detach().flatten()[::step].double().cpu().tolist()
    return tuple(values)
