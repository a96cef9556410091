"""Gradient exchange of experiment variants: none, one element per bucket, or half precision.

The collectives have the same number and order as in the real run. The function is chosen once; in
an interleaved run every bucket looks up the current variant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.futures import Future

from nfold.engines.interleaver import ActiveVariant

AllReduce = Callable[..., Any]  # ``dist.all_reduce`` or a replacement


class CompletedWork:
    """The handle of a collective that does nothing."""

    def wait(self) -> None:
        pass


def _skip_all_reduce(_tensor: Tensor, **_how: Any) -> CompletedWork:
    return CompletedWork()


def _all_reduce_one_element(tensor: Tensor, **how: Any) -> Any:
    return dist.all_reduce(torch.zeros(1, device=tensor.device), **how)


ALL_REDUCE_VARIANTS: dict[str, AllReduce] = {
    "none": _skip_all_reduce,
    "barrier": _all_reduce_one_element,
}


def select_all_reduce(active_variant: ActiveVariant) -> AllReduce:
    """Return the all-reduce that ``GradientExchange`` calls for each bucket."""
    if active_variant.is_baseline("exchange"):
        return dist.all_reduce
    if not active_variant.interleaved:
        return ALL_REDUCE_VARIANTS[active_variant.current.exchange]

    def send(tensor: Tensor, **how: Any) -> Any:
        exchange = active_variant.current.exchange
        all_reduce: AllReduce = ALL_REDUCE_VARIANTS.get(exchange, dist.all_reduce)
        return all_reduce(tensor, **how)

    return send


def _barrier_hook(bucket: Any) -> Future[Tensor]:
    gradients = bucket.buffer()
    work: Any = _all_reduce_one_element(gradients, async_op=True)
    done: Future[Tensor] = work.get_future().then(lambda _: gradients)
    return done


def _half_precision_hook(group: Any, bucket: Any) -> Future[Tensor]:
    nccl = bucket.buffer().is_cuda and "nccl" in dist.get_backend(group)
    hook: Any = bf16_compress_hook if nccl else fp16_compress_hook
    compressed: Future[Tensor] = hook(group, bucket)
    return compressed


# DistributedDataParallel refuses hooks with annotations as strings, which this file has.
DDP_HOOK_VARIANTS: dict[str, Any] = {
    "none": noop_hook,
    "barrier": lambda _state, bucket: _barrier_hook(bucket),
    "half": lambda group, bucket: _half_precision_hook(group, bucket),
}


def select_ddp_hook(active_variant: ActiveVariant, default_hook: Any) -> Any:
    """Return the communication hook of DistributedDataParallel; None for its own all-reduce.

    The hook is registered with the process group as its state.
    """
    if active_variant.is_baseline("exchange"):
        return default_hook
    if not active_variant.interleaved:
        return DDP_HOOK_VARIANTS[active_variant.current.exchange]
    real = default_hook or allreduce_hook

    def exchange(state, bucket):  # type: ignore[no-untyped-def]
        return DDP_HOOK_VARIANTS.get(active_variant.current.exchange, real)(state, bucket)

    return exchange
