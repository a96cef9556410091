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

    def update(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Backward and optimizer step; under fp16 the loss is scaled and bad steps are skipped."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
