"""Too little memory: a ballast, and a tensor that is a little larger every time it is made.

The ballast leaves ``ROOM_BYTES``. More than half of that is kept by the allocator for the tensor
of last time, which is too small for the next: so the allocator has to give it back and ask again,
every time. Segments that grow in place grow by what is missing instead. The tensor is of a stream
of its own: what PyTorch keeps for one stream serves no other, so that no tensor of the script's
comes to lie in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CUDA: Any = torch.cuda
"""Typed in one version of PyTorch, untyped in another."""
ROOM_BYTES = 8 * 2**30
PIECE_BYTES = 2 * 2**20
"""The allocator rounds large sizes up to this."""
SMALLEST, LARGEST = 0.55, 0.57
"""Of the room: two of the smallest do not fit.

What giving back and asking again takes grows with the size: so the sizes are within a few percent
of each other, and forty steps by the script's own clock cost what four hundred cost elsewhere.
"""
SETTLED = 4
"""Steps until the script's own tensors have their memory."""


class Ballast:
    """Makes the growing tensor ``count`` times a step; the ballast is laid in step SETTLED."""

    def __init__(self, count: float, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"memory on {device}: allowed are GPUs")
        self._count = round(count)
        self._device = device
        self._steps = 0
        self._ballast: Tensor | None = None
        self._stream: Any = None
        self._sizes = (0, 0)
        self._size = 0

    def __call__(self) -> None:
        self._steps += 1
        if self._steps < SETTLED:
            return
        if self._ballast is None:
            self._lay()
        for _ in range(self._count):
            self._grow()

    def _lay(self) -> None:
        free = CUDA.mem_get_info(self._device)[0]
        room = min(ROOM_BYTES, free // 2)
        self._ballast = torch.empty(free - room, dtype=torch.uint8, device=self._device)
        self._stream = CUDA.Stream(self._device)
        self._sizes = sizes(room)
        self._size = self._sizes[0]

    def _grow(self) -> None:
        """One more; after the largest, from the smallest on."""
        if self._size > self._sizes[1]:
            CUDA.empty_cache()
            self._size = self._sizes[0]
        with CUDA.stream(self._stream):
            torch.empty(self._size, dtype=torch.uint8, device=self._device)
        self._size += PIECE_BYTES


def sizes(room_bytes: int) -> tuple[int, int]:
    """The smallest and the largest tensor that this room is for."""
    small, large = (int(part * room_bytes) for part in (SMALLEST, LARGEST))
    return small // PIECE_BYTES * PIECE_BYTES, large // PIECE_BYTES * PIECE_BYTES
