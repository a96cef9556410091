"""How losses that PyTorch keeps on a device are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def losses_of(kept: Sequence[Tensor]) -> list[float]:
    """One loss a step, copied to the host at once."""
    found: list[float] = torch.stack(list(kept)).tolist()
    return found
