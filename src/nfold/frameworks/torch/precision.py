"""Arithmetic: fp32, tf32 inside fp32 products, bf16 or fp16 under autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

AUTOCAST: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Casts the forward pass and steps the optimizer as one precision needs it."""

    def __init__(self, name: str, device: torch.device) -> None:
        allow_tf32 = name == "tf32"
        torch.backends.cudnn.allow_tf32 = allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32
        self._device = device.type
        self._dtype = AUTOCAST.get(name)
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def forward(self) -> AbstractContextManager[None]:
        """The context of a forward pass; fp32 and tf32 need none and get a disabled one."""
        return torch.autocast(self._device, dtype=self._dtype, enabled=self._dtype is not None)

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to those that are there; under fp16 they are scaled."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step and clear the gradients; under fp16 a step whose gradients overflowed is skipped.

        With a fused optimizer the host does not wait: the device reads whether they did, and
        moves the scale, so that a graph can hold all of it.
        """
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
