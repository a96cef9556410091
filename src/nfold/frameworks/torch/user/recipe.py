"""How a loader of ``run.loader`` treats its data, and what it fetches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from nfold.frameworks.torch.user.batches import BatchDivision, SampleSlice, epoch_order

AugmentBatch = Callable[[Any, Tensor, int], Any]
"""A batch on the device, its samples' numbers [n] and its epoch to the batch that is trained on."""
FetchedBatch = tuple[SampleSlice, Any, Tensor]
"""A part of a step, its batch, and the numbers of its samples [n]."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How a loader treats its data; ``train`` loaders tell the exchange what batches weigh.

    ``input`` is ``resident`` (on the device), ``loader``, or None for arrays on GPUs where they
    fit and everything else by a loader. ``options`` are DataLoader's.
    """

    division: BatchDivision
    device: torch.device
    seed: int
    shuffle: bool
    train: bool
    workers: int = 0
    input: str | None = None
    augment: AugmentBatch | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    options: dict[str, Any] = field(default_factory=dict)

    def epoch_order(self, samples: int, epoch: int) -> Tensor:
        """The order of an epoch of so many samples: int64 [samples], the same on every rank."""
        return epoch_order(samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
