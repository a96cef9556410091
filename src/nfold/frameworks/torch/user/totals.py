"""Sums and means over all ranks, for what a script counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nfold.frameworks.torch.parallel import all_reduce_sum


def sum_over_ranks(value: Any, device: torch.device, world_size: int) -> Any:
    """The sum over all ranks: of a number, a number of its kind; of a tensor, a tensor."""
    if isinstance(value, Tensor):
        return all_reduce_sum(value.detach().clone().to(device), world_size)
    given = np.asarray(value)
    exact = np.int64 if given.dtype.kind in "biu" else np.float64
    return sum_over_ranks(torch.from_numpy(given.astype(exact)), device, world_size).item()


def weighted_mean(value: Any, count: int, device: torch.device, world_size: int) -> float:
    """The mean over all ranks, each counting ``count`` times; NaN where nobody counts."""
    value = value.detach() if isinstance(value, Tensor) else value
    weighted = float(value) * count if count else 0.0  # not NaN of what counts nothing
    own = torch.tensor([weighted, count], dtype=torch.float64)
    whole, counted = sum_over_ranks(own, device, world_size).tolist()
    return float(whole / counted) if counted else math.nan
