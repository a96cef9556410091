"""What experiments exchange in place of gradients: nothing, one element a bucket, or half of them.

As many collectives as in the real run, in the same order. Chosen once, and no step asks, unless
experiments take turns: then every bucket looks for what is exchanged now.
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

from nfold.frameworks.left_out import LeftOut

AllReduce = Callable[..., Any]
"""``dist.all_reduce``, or what stands in for it."""


class Done:
    """A collective that was over before it began."""

    def wait(self) -> None:
        """There is nothing to wait for."""


def _nothing(_tensor: Tensor, **_how: Any) -> Done:
    return Done()


def _one_element(tensor: Tensor, **how: Any) -> Any:
    return dist.all_reduce(torch.zeros(1, device=tensor.device), **how)


ALL_REDUCE: dict[str, AllReduce] = {"none": _nothing, "barrier": _one_element}


def all_reduce(left_out: LeftOut) -> AllReduce:
    """What our own exchange sends a bucket with."""
    if left_out.never("exchange"):
        return dist.all_reduce
    if not left_out.turns:
        return ALL_REDUCE[left_out.now.exchange]

    def send(tensor: Tensor, **how: Any) -> Any:
        now: AllReduce = ALL_REDUCE.get(left_out.now.exchange, dist.all_reduce)
        return now(tensor, **how)

    return send


def _in_its_place(bucket: Any) -> Future[Tensor]:
    """One element in a bucket's place; the bucket comes back as it was."""
    gradients = bucket.buffer()
    work: Any = _one_element(gradients, async_op=True)
    done: Future[Tensor] = work.get_future().then(lambda _: gradients)
    return done


def _half(group: Any, bucket: Any) -> Future[Tensor]:
    """By the hook that a script can have there: bf16 is NCCL's alone."""
    nccl = bucket.buffer().is_cuda and "nccl" in dist.get_backend(group)
    hook: Any = bf16_compress_hook if nccl else fp16_compress_hook
    found: Future[Tensor] = hook(group, bucket)
    return found


# DistributedDataParallel refuses a hook whose annotations are text, as they are in this file.
DDP_HOOKS: dict[str, Any] = {
    "none": noop_hook,
    "barrier": lambda _state, bucket: _in_its_place(bucket),
    "half": lambda group, bucket: _half(group, bucket),
}


def ddp_hook(left_out: LeftOut, usual: Any) -> Any:
    """What DistributedDataParallel does with a bucket; None: its own all-reduce.

    The hook is registered with the process group as its state.
    """
    if left_out.never("exchange"):
        return usual
    if not left_out.turns:
        return DDP_HOOKS[left_out.now.exchange]
    real = usual or allreduce_hook

    def exchange(state, bucket):  # type: ignore[no-untyped-def]
        return DDP_HOOKS.get(left_out.now.exchange, real)(state, bucket)

    return exchange
