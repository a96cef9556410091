"""Batches of any form, tensors inside tuples, lists and dictionaries, moved to a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nfold.frameworks.torch.nested import over_tensors


def moved(value: Any, device: torch.device, memory: torch.memory_format | None = None) -> Any:
    """``value`` with its tensors on ``device``, images [n, c, h, w] in the format ``memory``."""

    def move(tensor: Tensor) -> Tensor:
        if memory is not None and tensor.dim() == 4:
            return tensor.to(device, non_blocking=True, memory_format=memory)
        return tensor.to(device, non_blocking=True)

    return over_tensors(value, move)
