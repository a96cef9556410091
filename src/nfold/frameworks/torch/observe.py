"""How losses that PyTorch keeps on a device are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def read_losses(tensors: Sequence[Tensor]) -> list[float]:
    """One loss a step, [] of a call of one step and [n] of one of n, copied to the host at once."""
    found: list[float] = torch.cat([losses.reshape(-1) for losses in tensors]).tolist()
    return found
