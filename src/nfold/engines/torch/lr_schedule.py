"""Learning rates: constant or one cycle for built-in workloads, the linear scaling rule for users."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from nfold.core.errors import UsageError
from nfold.engines.builtin_workloads import one_cycle
from nfold.engines.torch.step.cuda_graph import make_capturable


class ConstantLearningRate:
    """Keeps the learning rate of the optimizer."""

    def set_step(self, step: int) -> None: ...

    def step_rates(self, _first: int, _steps: int) -> Tensor:
        """Return the rates of ``steps`` steps from step ``first`` on, for ``load_rate``."""
        return torch.empty(0)

    def load_rate(self, rates: Tensor, step: int) -> None:
        """Set the rate of step ``step`` of ``rates``."""


class OneCycleLearningRate(ConstantLearningRate):
    """Fills the rate into a tensor before every step; a captured step reads it.

    A checkpoint restores the rate on the host: it moves to the device first.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, peak: float, steps: int, device: torch.device
    ) -> None:
        self._optimizer, self._device = optimizer, device
        self._peak, self._steps = peak, steps
        self._all_rates: Tensor | None = None

    def set_step(self, step: int) -> None:
        rate = self._rate(step)
        for group in self._optimizer.param_groups:
            if getattr(group["lr"], "device", None) != self._device:
                make_capturable(self._optimizer, self._device)
            group["lr"].fill_(rate)

    def step_rates(self, first: int, steps: int) -> Tensor:
        if self._all_rates is None:
            rates = [self._rate(step) for step in range(self._steps)]
            self._all_rates = torch.tensor(rates, dtype=torch.float64, device=self._device)
        return self._all_rates[first : first + steps]

    def load_rate(self, rates: Tensor, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"].copy_(rates[step])

    def _rate(self, step: int) -> float:
        return self._peak * one_cycle((step + 0.5) / self._steps)


def linear_scaling_rule(
    optimizer: Optimizer, *, batch: int, base_batch: int, warmup_steps: int
) -> LambdaLR:
    """Return a schedule that raises the learning rate by ``batch / base_batch``.

    It begins at the optimizer's own rate, which suits ``base_batch``, and rises linearly over
    ``warmup_steps`` (P. Goyal and others, Accurate, Large Minibatch SGD, arXiv:1706.02677, 2017).
    Step it after each optimizer step. nfold never applies it by itself, because it changes training.

    Args:
        optimizer: The optimizer whose rate changes.
        batch: Samples of one step over all devices.
        base_batch: Samples of a step that the optimizer's rate was chosen for.
        warmup_steps: Steps until the full rate; 0 for none.

    Raises:
        UsageError: ``batch`` or ``base_batch`` is below 1, or ``warmup_steps`` below 0.
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
    """Pass every ``step`` of a schedule to ``handle_step`` as a function.

    Changes the class, not the object: attributes of the object go into its checkpoint.
    """
    original = type(schedule)

    @wraps(original.step)
    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        handle_step(lambda: original.step(self, *args, **kwargs))

    body = {"step": step, "__module__": original.__module__, "__doc__": original.__doc__}
    schedule.__class__ = type(original.__name__, (original,), body)
