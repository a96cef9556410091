"""Batches of any form, tensors inside tuples, lists and dictionaries, moved to a device.

On a GPU a loader's batches are copied one ahead, as in nfold's own training (prefetch.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from nfold.frameworks.torch.nested import map_tensors
from nfold.frameworks.torch.prefetch import prefetch_items

Description = TypeVar("Description")


def to_device(
    value: Any, device: torch.device, memory_format: torch.memory_format | None = None
) -> Any:
    """``value`` with its tensors on ``device``, images [n, c, h, w] in the format ``memory``."""

    def move(tensor: Tensor) -> Tensor:
        if memory_format is not None and tensor.dim() == 4:
            return tensor.to(device, non_blocking=True, memory_format=memory_format)
        return tensor.to(device, non_blocking=True)

    return map_tensors(value, move)


def prefetch_to_device(
    batches: Iterable[tuple[Description, Any, Tensor]], device: torch.device
) -> Iterable[tuple[Description, Any, Tensor]]:
    """What a loader reads, (about it, batch, ids), the batch on ``device``."""

    def land(read: tuple[Description, Any, Tensor]) -> tuple[Description, Any, Tensor]:
        about, batch, ids = read
        return about, to_device(batch, device), ids

    return prefetch_items(batches, device, land, lambda read: _collect_tensors(read[1]))


def _collect_tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found
