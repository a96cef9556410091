"""Batches of any form, tensors inside tuples, lists and dictionaries, moved to a device.

On a GPU a loader's batches are copied one ahead, as in nfold's own training (prefetch.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from nfold.frameworks.torch.nested import over_tensors
from nfold.frameworks.torch.prefetch import one_ahead

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
    if device.type != "cuda":
        return ((about, moved(batch, device), ids) for about, batch, ids in batches)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copying: list[torch.cuda.Event] = []

    def begin(read: tuple[About, Any, Tensor]) -> tuple[About, Any, Tensor]:
        about, batch, ids = read
        with torch.cuda.stream(side):
            there = moved(batch, device)
            copying.append(side.record_event())
        return about, there, ids

    def finish(read: tuple[About, Any, Tensor]) -> tuple[About, Any, Tensor]:
        """The step's stream waits for the copies, not the host, and keeps their memory."""
        current = torch.cuda.current_stream(device)
        current.wait_event(copying.pop(0))
        about, there, ids = read
        return about, over_tensors(there, lambda tensor: _kept(tensor, current)), ids

    return one_ahead(batches, begin, finish)


def _kept(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """The tensor, whose memory is not given to another before ``stream`` is through with it."""
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor
