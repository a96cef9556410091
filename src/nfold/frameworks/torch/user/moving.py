"""Batches of any form, tensors inside tuples, lists and dictionaries, moved to a device.

On a GPU a loader's batches are copied one ahead, as in nfold's own training (prefetch.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from nfold.frameworks.torch.nested import over_tensors
from nfold.frameworks.torch.prefetch import brought

About = TypeVar("About")


def moved(value: Any, device: torch.device, memory: torch.memory_format | None = None) -> Any:
    """``value`` with its tensors on ``device``, images [n, c, h, w] in the format ``memory``."""

    def move(tensor: Tensor) -> Tensor:
        if memory is not None and tensor.dim() == 4:
            return tensor.to(device, non_blocking=True, memory_format=memory)
        return tensor.to(device, non_blocking=True)

    return over_tensors(value, move)


def landed(
    batches: Iterable[tuple[About, Any, Tensor]], device: torch.device
) -> Iterable[tuple[About, Any, Tensor]]:
    """What a loader reads, (about it, batch, ids), the batch on ``device``."""

    def land(read: tuple[About, Any, Tensor]) -> tuple[About, Any, Tensor]:
        about, batch, ids = read
        return about, moved(batch, device), ids

    return brought(batches, device, land, lambda read: _tensors(read[1]))


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    over_tensors(value, note)
    return found
