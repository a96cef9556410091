"""Loss scaling for fp16 (P. Micikevicius and others, Mixed Precision Training, ICLR 2018)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nfold.errors import UsageError

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the scale is doubled."""


class LossScale:
    """Scales a loss before backward, and gradients back after it.

    A step whose gradients overflowed keeps none, so that an optimizer leaves every parameter as
    it is. Every rank sees the exchanged gradients and decides the same.
    """

    def __init__(self) -> None:
        self.scale = INITIAL_SCALE
        self.good_steps = 0
        self._backwards = 0
        self._stepped: dict[torch.optim.Optimizer, int] = {}

    def backward(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """``loss.backward()``; afterwards gradients are those of the loss itself, or None.

        Gradients of an earlier backward are scaled first, so that those of both add up.
        """
        parameters = list(parameters)
        earlier = _gradients(parameters)
        if earlier:
            torch._foreach_mul_(earlier, self.scale)
        (loss * self.scale).backward()  # type: ignore[no-untyped-call]
        self._backwards += 1
        self._unscale(parameters)

    def _unscale(self, parameters: list[nn.Parameter]) -> None:
        gradients = _gradients(parameters)
        if not gradients:
            return
        finite = bool(torch.nn.utils.get_total_norm(gradients).isfinite())
        if finite:
            torch._foreach_mul_(gradients, 1 / self.scale)
        else:
            for parameter in parameters:
                parameter.grad = None
        self._adapt(finite)

    def _adapt(self, finite: bool) -> None:
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0

    def require_scaled_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step of ``optimizer`` without a scaled backward since its last one."""
        optimizer.register_step_pre_hook(self._check)

    def _check(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        before, self._stepped[optimizer] = self._stepped.get(optimizer, 0), self._backwards
        if before == self._backwards:
            raise UsageError(
                "precision fp16 needs a scaled loss; next: run.backward(loss) in place of "
                "loss.backward(), or precision bf16, which needs none"
            )

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, float]) -> None:
        """Go on from ``state``."""
        self.scale, self.good_steps = state["scale"], int(state["good_steps"])


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
