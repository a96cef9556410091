"""Copies of a script exchange their gradients all at once, before each step of an optimizer.

What a process a device would cost if nothing of the exchange were hidden behind backward. The
copies know nothing of each other: the group is of this experiment alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nfold.frameworks.base import Task
from nfold.frameworks.left_out import ActiveVariant
from nfold.frameworks.torch.exchange import BUCKET_BYTES, split_into_buckets
from nfold.frameworks.torch.script.environment import RENDEZVOUS_VARIABLE
from nfold.frameworks.torch.script.sparse import is_sparse

COMMUNICATION_TIMEOUT = timedelta(seconds=60)


UNTYPED_DIST: Any = dist
UNTYPED_C10D: Any = distributed_c10d
"""Not everything in them is in their stubs."""


class PostBackwardAllReduce:
    """Stands in front of every optimizer's step, where an experiment asks for it at some time."""

    def __init__(self, task: Task, variant: ActiveVariant) -> None:
        self._task = task
        self._variant = variant
        self._group: Any = None
        self._reduced_optimizer: Any = None
        self._hook: Any = None

    def install(self) -> None:
        """Before the first step."""
        if not self._variant.is_baseline("exchange_after_backward"):
            self._hook = register_optimizer_step_pre_hook(lambda one, *_: self._before_step(one))

    def uninstall(self) -> None:
        """No more."""
        if self._hook is not None:
            self._hook.remove()

    def on_scaler_step(self, optimizer: Any) -> None:
        """A GradScaler's step begins: ranks that skip it must exchange as well."""
        if self._hook is not None:
            self.all_reduce(optimizer)
            self._reduced_optimizer = optimizer

    def _before_step(self, optimizer: Any) -> None:
        if self._reduced_optimizer is not optimizer:
            self.all_reduce(optimizer)
        self._reduced_optimizer = None

    def all_reduce(self, optimizer: Any) -> None:
        """The gradients of what an optimizer trains, or what stands for one."""
        if not self._variant.current.exchange_after_backward:
            return
        given = [p for group in optimizer.param_groups for p in group["params"]]
        own = [parameter for parameter in given if parameter.requires_grad]
        for bucket in split_into_buckets(own, BUCKET_BYTES, BUCKET_BYTES):
            self._all_reduce_bucket(bucket)

    @torch.no_grad()
    def _all_reduce_bucket(self, parameters: Sequence[Tensor]) -> None:
        """The sum over all copies; one that has no gradient takes part with zeros.

        Sparse gradients are sent as dense ones, and stay this copy's own.
        """
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.to_dense().reshape(-1) for g in gradients])
        if self._group is None:
            self._group = self._create_group(flat.device)
        self._group.allreduce([flat]).wait()
        first = 0
        for gradient in gradients:
            own = flat[first : first + gradient.numel()]
            if not is_sparse(gradient):
                gradient.copy_(own.view_as(gradient))
            first += gradient.numel()

    def _create_group(self, device: torch.device) -> Any:
        """A group that is not the script's: by the store of those who started all copies."""
        host, _, port = os.environ[RENDEZVOUS_VARIABLE].rpartition(":")
        whole = UNTYPED_DIST.TCPStore(
            host, int(port), is_master=False, timeout=COMMUNICATION_TIMEOUT
        )
        store = UNTYPED_DIST.PrefixStore("nfold", whole)
        rank, world = self._task.rank, self._task.world_size
        if device.type == "cuda":
            options = UNTYPED_C10D.ProcessGroupNCCL.Options()
            options._timeout = COMMUNICATION_TIMEOUT
            return UNTYPED_C10D.ProcessGroupNCCL(store, rank, world, options)
        return UNTYPED_C10D.ProcessGroupGloo(store, rank, world, COMMUNICATION_TIMEOUT)
