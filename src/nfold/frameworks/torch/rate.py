"""The learning rate of a built-in workload while it trains: fixed, or one cycle up and down."""

from __future__ import annotations

import torch

from nfold.frameworks.rate import one_cycle
from nfold.frameworks.torch.capturable import make_capturable


class Fixed:
    """The rate that the optimizer has."""

    def at(self, step: int) -> None:
        """Nothing changes."""


class OneCycle(Fixed):
    """Fills the rate in before every step, where a captured step reads it too.

    A checkpoint brings a rate of its own, on the host, which moves to the device first.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, peak: float, steps: int, device: torch.device
    ) -> None:
        self._optimizer, self._device = optimizer, device
        self._peak, self._steps = peak, steps

    def at(self, step: int) -> None:
        """Set the rate of step number ``step``, counted from 0."""
        rate = self._peak * one_cycle((step + 0.5) / self._steps)
        for group in self._optimizer.param_groups:
            if getattr(group["lr"], "device", None) != self._device:
                make_capturable(self._optimizer, self._device)
            group["lr"].fill_(rate)
