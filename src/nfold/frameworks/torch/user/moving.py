"""Batches of any form, tensors inside tuples, lists and dictionaries, moved to a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def over_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed; what holds no tensor is left as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(over_tensors(item, change) for item in value))
    if type(value) in (list, tuple):
        return type(value)(over_tensors(item, change) for item in value)
    if type(value) is dict:
        return {name: over_tensors(item, change) for name, item in value.items()}
    return value


def moved(value: Any, device: torch.device, memory: torch.memory_format | None = None) -> Any:
    """``value`` with its tensors on ``device``, images [n, c, h, w] in the format ``memory``."""

    def move(tensor: Tensor) -> Tensor:
        if memory is not None and tensor.dim() == 4:
            return tensor.to(device, non_blocking=True, memory_format=memory)
        return tensor.to(device, non_blocking=True)

    return over_tensors(value, move)
