"""Samples that take a while each."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Slow(Dataset[tuple[Tensor, int]]):
    """1 ms for each sample."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(1e-3)
        return torch.full((16,), float(index)), index % 4
