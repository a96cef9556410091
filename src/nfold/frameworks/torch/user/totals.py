"""Sums and means over all ranks, for what a script counts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nfold.frameworks.torch.parallel import summed


def total(value: Any, device: torch.device, world_size: int) -> Any:
    """The sum over all ranks: of a number, a number of its kind; of a tensor, a tensor."""
    if isinstance(value, Tensor):
        return summed(value.detach().clone().to(device), world_size)
    exact = torch.float64 if isinstance(value, float) else torch.int64
    return total(torch.tensor(value, dtype=exact), device, world_size).item()


def weighted_mean(value: Any, count: int, device: torch.device, world_size: int) -> float:
    """The mean over all ranks, each counting ``count`` times; NaN where nobody counts."""
    value = value.detach() if isinstance(value, Tensor) else value
    weighted = float(value) * count if count else 0.0  # not NaN of what counts nothing
    own = torch.tensor([weighted, count], dtype=torch.float64)
    whole, counted = total(own, device, world_size).tolist()
    return float(whole / counted) if counted else math.nan
