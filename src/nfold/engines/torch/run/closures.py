"""Closures of optimizers that compute the loss in their step, such as LBFGS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nfold.core.errors import UsageError
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.communication.data_parallel import all_reduce_sum


def share_closures(
    optimizer: Optimizer, current_share: CurrentShare, device: torch.device, world_size: int
) -> None:
    """Let ``optimizer.step(closure)`` see the mean loss over all ranks.

    LBFGS decides by the loss how far it steps: with losses of their own, ranks would diverge.
    """

    def share(argument: Any) -> Any:
        if not callable(argument):
            return argument
        return SharedClosure(argument, current_share, device, world_size)

    def before_step(_: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return (args[0], *map(share, args[1:])), {n: share(one) for n, one in options.items()}

    optimizer.register_step_pre_hook(before_step)


@dataclass
class SharedClosure:
    """The closure of one step; returns the mean loss over all ranks."""

    closure: Callable[[], Any]
    current_share: CurrentShare
    device: torch.device
    world_size: int
    calls: int = 0

    def __call__(self) -> Tensor | None:
        share = self.current_share.share
        self.calls += 1
        if share.micro_batches > 1 and self.calls > 1:
            raise UsageError(
                "an optimizer that computes the loss several times per step needs the whole batch "
                "at once; next: accumulate=1"
            )
        loss = self.closure()
        if loss is None:
            return None
        own = torch.as_tensor(loss, device=self.device).detach()
        weighted = torch.stack([own * share.weight, torch.full_like(own, share.weight)])
        total, weight = all_reduce_sum(weighted, self.world_size)
        mean: Tensor = total / weight
        return mean
