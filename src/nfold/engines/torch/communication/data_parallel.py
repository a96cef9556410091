"""How large buckets of gradients should be here: from the time that an all-reduce takes.

An all-reduce of n bytes takes about ``latency + n / bandwidth``. Small buckets start early, but
each pays the latency; a bucket is as large as makes the latency a tenth of its time.
"""

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
from nfold.engines.torch.batch import BatchShare, CurrentShare
from nfold.engines.torch.communication import exchange_variants
from nfold.engines.torch.communication.gradient_exchange import GradientExchange
from nfold.engines.torch.devices import Devices

PROBED_BYTES = (2**16, 2**20, 2**23)
"""Bytes that are timed."""
PROBE_REPEATS = 5
LATENCY_FRACTION = 0.1
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES = 2**20, 2**26


@cache
def measure_bucket_bytes(device: torch.device, world_size: int) -> int:
    """The bucket size for this process group, the same on every rank; all ranks must call it.

    Measured once, in some tens of milliseconds on GPUs and on a host's loopback.
    """
    if world_size == 1:
        return MAX_BUCKET_BYTES
    seconds = [_time_all_reduce(size, device) for size in PROBED_BYTES]
    chosen = torch.tensor(choose_bucket_bytes(PROBED_BYTES, seconds), device=device)
    dist.broadcast(chosen, src=0)
    return int(chosen.item())


def choose_bucket_bytes(sizes: tuple[int, ...], seconds: list[float]) -> int:
    """The bytes at which the latency of a line through the measurements is OVERHEAD of the time."""
    slope, latency = statistics.linear_regression(sizes, seconds)
    if slope <= 0:
        return MAX_BUCKET_BYTES
    wanted = max(0.0, latency) * (1 - LATENCY_FRACTION) / LATENCY_FRACTION / slope
    return round(min(max(wanted, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES))


def _time_all_reduce(size: int, device: torch.device) -> float:
    values = torch.zeros(size // 4, device=device)
    taken = []
    for _ in range(PROBE_REPEATS + 1):
        _synchronize(device)
        started = time.perf_counter()
        dist.all_reduce(values)
        _synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    hook = exchange_variants.select_ddp_hook(
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
        all_reduce=exchange_variants.select_all_reduce(active_variant),
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


def collective_count() -> int:
    """Return how many collectives the default process group has started on this rank."""
    count: int = dist.group.WORLD._get_sequence_number_for_group()
    return count


def _on_cuda() -> bool:
    return dist.get_backend() == "nccl"


def sum_over_ranks(value: Any, device: torch.device, world_size: int) -> Any:
    """The sum over all ranks: of a number, a number of its kind; of a tensor, a tensor."""
    if isinstance(value, Tensor):
        return all_reduce_sum(value.detach().clone().to(device), world_size)
    given = np.asarray(value)
    exact = np.int64 if given.dtype.kind in "biu" else np.float64
    return sum_over_ranks(torch.from_numpy(given.astype(exact)), device, world_size).item()


def weighted_mean(value: Any, count: int, device: torch.device, world_size: int) -> float:
    """The mean over all ranks, each counting ``count`` times; NaN where nobody counts."""
    value = value.detach() if isinstance(value, Tensor) else value
    weighted = float(value) * count if count else 0.0  # not NaN of what counts nothing
    own = torch.tensor([weighted, count], dtype=torch.float64)
    whole, counted = sum_over_ranks(own, device, world_size).tolist()
    return float(whole / counted) if counted else math.nan


SAMPLED_VALUES = 64
"""Numbers that tell by how much parameters differ."""


def parameter_checksum(parameters: Iterable[Tensor]) -> str:
    """Equal on all ranks whose parameters are equal, bit by bit."""
    return checksum(_parameter_contents(parameters))


def _parameter_contents(parameters: Iterable[Tensor]) -> Iterator[bytes]:
    for parameter in parameters:
        values = parameter.detach().cpu().contiguous().flatten()
        yield values.view(torch.uint8).numpy().tobytes()


def sample_parameters(parameters: Sequence[Tensor]) -> tuple[float, ...]:
    """SOME of their numbers, from as many parameters as there are, in the same places on all ranks.

    None where no parameter has any.
    """
    several = [one for one in parameters if one.numel() and one.is_floating_point()]
    several = several[:: -(-len(several) // SAMPLED_VALUES) or 1]
    each = -(-SAMPLED_VALUES // len(several)) if several else 0
    return tuple(number for one in several for number in _sample_values(one, each))


def _sample_values(parameter: Tensor, count: int) -> list[float]:
    step = -(-parameter.numel() // count)
    found: list[float] = parameter.detach().flatten()[::step].double().cpu().tolist()
    return found
