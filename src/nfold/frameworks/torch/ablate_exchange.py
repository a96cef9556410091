"""What experiments exchange in place of gradients: nothing, or one element a bucket.

As many collectives as in the real run, in the same order. Chosen once; no step asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.futures import Future

from nfold.frameworks.base import Task

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


def all_reduce(task: Task) -> AllReduce:
    """What our own exchange sends a bucket with."""
    return ALL_REDUCE.get(task.left_out.exchange, dist.all_reduce)


def _in_its_place(bucket: Any) -> Future[Tensor]:
    """One element in a bucket's place; the bucket comes back as it was."""
    gradients = bucket.buffer()
    work: Any = _one_element(gradients, async_op=True)
    done: Future[Tensor] = work.get_future().then(lambda _: gradients)
    return done


# DistributedDataParallel refuses a hook whose annotations are text, as they are in this file.
DDP_HOOKS: dict[str, Any] = {
    "none": noop_hook,
    "barrier": lambda _state, bucket: _in_its_place(bucket),
}


def ddp_hook(task: Task, usual: Any) -> Any:
    """What DistributedDataParallel does with a bucket; None: its own all-reduce."""
    return DDP_HOOKS.get(task.left_out.exchange, usual)
