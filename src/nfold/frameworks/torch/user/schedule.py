"""Learning-rate schedules: the linear scaling rule for larger batches, and steps in parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from nfold.errors import UsageError


def linear_scaling_rule(
    optimizer: Optimizer, *, batch: int, base_batch: int, warmup_steps: int
) -> LambdaLR:
    """A schedule that raises the learning rate by ``batch / base_batch``; step it once a step.

    It begins at the optimizer's own rate, which suits ``base_batch``, and rises linearly over
    ``warmup_steps`` (P. Goyal and others, Accurate, Large Minibatch SGD, arXiv:1706.02677,
    2017). It changes training: nfold never applies it by itself.
    """
    for name, value in (("batch", batch), ("base_batch", base_batch)):
        if value < 1:
            raise UsageError(f"{name} {value}: allowed are whole numbers from 1")
    if warmup_steps < 0:
        raise UsageError(f"warmup_steps {warmup_steps}: allowed are whole numbers from 0")
    gain = batch / base_batch - 1

    def factor(step: int) -> float:
        return 1 + gain * (min(1.0, step / warmup_steps) if warmup_steps else 1.0)

    return LambdaLR(optimizer, factor)


def intercept_steps(
    schedule: LRScheduler, handle_step: Callable[[Callable[[], None]], None]
) -> None:
    """Have every ``step`` of a schedule hand to ``change`` what it would do.

    Its class is changed, not the object: what an object holds goes into its checkpoint.
    """
    original = type(schedule)

    @wraps(original.step)
    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        handle_step(lambda: original.step(self, *args, **kwargs))

    body = {"step": step, "__module__": original.__module__, "__doc__": original.__doc__}
    schedule.__class__ = type(original.__name__, (original,), body)
