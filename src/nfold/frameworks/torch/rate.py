"""The learning rate of a built-in workload while it trains: fixed, or one cycle up and down."""

from __future__ import annotations

import torch
from torch import Tensor

from nfold.frameworks.rate import one_cycle
from nfold.frameworks.torch.capturable import make_capturable


class ConstantLearningRate:
    """The rate that the optimizer has."""

    def set_step(self, step: int) -> None:
        """Nothing changes."""

    def step_rates(self, _first: int, _steps: int) -> Tensor:
        """What ``take`` needs in so many steps: nothing."""
        return torch.empty(0)

    def load_rate(self, rates: Tensor, step: int) -> None:
        """Nothing changes."""


class OneCycleLearningRate(ConstantLearningRate):
    """Fills the rate in before every step, where a captured step reads it too.

    A checkpoint brings a rate of its own, on the host, which moves to the device first.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, peak: float, steps: int, device: torch.device
    ) -> None:
        self._optimizer, self._device = optimizer, device
        self._peak, self._steps = peak, steps
        self._all_rates: Tensor | None = None

    def set_step(self, step: int) -> None:
        """Set the rate of step number ``step``, counted from 0."""
        rate = self._rate(step)
        for group in self._optimizer.param_groups:
            if getattr(group["lr"], "device", None) != self._device:
                make_capturable(self._optimizer, self._device)
            group["lr"].fill_(rate)

    def step_rates(self, first: int, steps: int) -> Tensor:
        """The rates of ``steps`` steps from number ``first`` on: float64 [steps] on the device."""
        if self._all_rates is None:
            rates = [self._rate(step) for step in range(self._steps)]
            self._all_rates = torch.tensor(rates, dtype=torch.float64, device=self._device)
        return self._all_rates[first : first + steps]

    def load_rate(self, rates: Tensor, step: int) -> None:
        """Set the rate to one of ``rates``, on the device: a graph may hold it."""
        for group in self._optimizer.param_groups:
            group["lr"].copy_(rates[step])

    def _rate(self, step: int) -> float:
        return self._peak * one_cycle((step + 0.5) / self._steps)
