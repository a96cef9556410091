"""Optimizers that a CUDA graph can hold: everything that a schedule changes is in tensors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

FUSED_OPTIMIZERS = (SGD, Adam, AdamW)
"""Whose fused kernel reads the learning rate from the device."""


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Let the optimizer step inside a graph, with the same results; again after a resume.

    A learning rate that is a number would be frozen into the graph, so it becomes a tensor,
    float32 [], which schedules fill in place.
    """
    for group in optimizer.param_groups:
        if type(optimizer) in FUSED_OPTIMIZERS:
            group["fused"], group["foreach"] = True, False
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        if "capturable" in group:  # asked for of fused kernels too, which always are
            group["capturable"] = True
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.device != device:
                state[name] = value.to(device)


def captured_settings(optimizer: Optimizer) -> Hashable:
    """What a graph of this optimizer's step holds fast: all of its settings but tensors."""
    return tuple(
        (name, _to_hashable(value))
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params" and not isinstance(value, Tensor)
    )


def _to_hashable(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value


def lr_versions(optimizer: Optimizer) -> list[int]:
    """How often each learning rate that is a tensor was changed in place."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate._version for rate in rates if isinstance(rate, Tensor)]
