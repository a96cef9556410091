"""Arithmetic: fp32, products in TF32, and bf16 or fp16 under autocast."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from nfold.core.errors import UsageError
from nfold.instrument.torch_private import foreach_mul

AUTOCAST: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def set_fp32_products(precision: str) -> None:
    """Let products of fp32 tensors use TF32, unless the precision is fp32.

    In bf16 and fp16, which round more, these are the products that autocast leaves in fp32.
    """
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"


def uses_tf32(device: torch.device) -> bool:
    """Return whether products or convolutions of fp32 tensors may use TF32 on a device."""
    allowed = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return device.type == "cuda" and allowed


class Precision:
    """Casts the forward pass and steps the optimizer for one precision."""

    def __init__(self, name: str, device: torch.device) -> None:
        set_fp32_products(name)
        self._device = device.type
        self._dtype = AUTOCAST.get(name)
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def forward(self) -> AbstractContextManager[None]:
        """Return the autocast context of a forward pass, disabled for fp32 and tf32."""
        return torch.autocast(self._device, dtype=self._dtype, enabled=self._dtype is not None)

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to the existing ones; under fp16 they are scaled."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step and clear the gradients; under fp16 a step with overflowed gradients is skipped.

        With a fused optimizer the device checks for overflow and adapts the scale: the host does
        not wait, and a CUDA graph can hold it.
        """
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)


INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # steps without an overflow after which the scale is doubled


class LossScale:
    """Scales a loss before backward, and its gradients back afterwards.

    Overflowed gradients are set to None, so that an optimizer skips every parameter. Every rank sees
    the exchanged gradients and decides the same.
    """

    def __init__(self) -> None:
        self.scale = INITIAL_SCALE
        self.good_steps = 0
        self._backwards = 0
        self._stepped: dict[torch.optim.Optimizer, int] = {}

    def backward(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """Call ``loss.backward()``; gradients are those of the loss itself, or None.

        Gradients of an earlier backward are scaled first, so that both add up.
        """
        parameters = list(parameters)
        earlier = _gradients(parameters)
        if earlier:
            foreach_mul(earlier, self.scale)
        (loss * self.scale).backward()  # type: ignore[no-untyped-call]
        self._backwards += 1
        gradients = _gradients(parameters)
        if not gradients:
            return
        if not torch.nn.utils.get_total_norm(gradients).isfinite():
            for parameter in parameters:
                parameter.grad = None
            self.scale, self.good_steps = self.scale / 2, 0
            return
        foreach_mul(gradients, 1 / self.scale)
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0

    def require_scaled_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UsageError for a step of ``optimizer`` without a scaled backward before it."""
        optimizer.register_step_pre_hook(self._check)

    def _check(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        before, self._stepped[optimizer] = self._stepped.get(optimizer, 0), self._backwards
        if before == self._backwards:
            raise UsageError(
                "precision fp16 needs a scaled loss; next: run.backward(loss) in place of "
                "loss.backward(), or precision bf16, which needs none"
            )

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.scale, self.good_steps = state_dict["scale"], int(state_dict["good_steps"])


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
