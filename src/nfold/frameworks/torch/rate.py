"""The learning rate of a built-in workload while it trains: fixed, or one cycle up and down."""

from __future__ import annotations

import torch

from nfold.frameworks.torch.capturable import make_capturable

RISE = 0.2
"""The part of the steps in which the rate rises to its peak."""


def one_cycle(progress: float) -> float:
    """The part of the peak at a place between 0, the first step, and 1, the end.

    L. Smith and N. Topin, Super-Convergence (arXiv:1708.07120, 2017): linearly up, then down to
    nothing.
    """
    return progress / RISE if progress < RISE else (1 - progress) / (1 - RISE)


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
