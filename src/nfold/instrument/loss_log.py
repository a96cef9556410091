"""The losses of a script's first steps, by which two runs of it are compared."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch

COMPARED_STEPS = 20


class LossLog:
    """Keeps what ``backward`` is called on, as tensors: reading a number would wait for the device."""

    def __init__(self) -> None:
        self._losses: dict[int, list[Any]] = {}

    def add(self, step: int, loss: Any) -> None:
        """Note a loss [] of the step after ``step`` others; other tensors are ignored."""
        if step >= COMPARED_STEPS or not isinstance(loss, torch.Tensor):
            return
        if loss.numel() == 1 and loss.is_floating_point():
            self._losses.setdefault(step, []).append(loss.detach().clone())

    def means(self) -> tuple[tuple[int, float], ...]:
        """Return (steps so far, mean loss of the micro-batches), and wait for the device."""
        return tuple(
            (step + 1, fmean(float(loss) for loss in losses))
            for step, losses in self._losses.items()
        )
