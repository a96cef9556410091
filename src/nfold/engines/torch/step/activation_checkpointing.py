"""Activation checkpointing inside a CUDA graph.

``torch.utils.checkpoint`` reads the state of the device's random generator, so that a recomputation
draws the numbers of its forward. PyTorch forbids that while a graph is recorded. A step that draws
no random number needs no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from nfold.core.errors import UsageError
from nfold.instrument.hooks.patches import Patches


@contextmanager
def checkpoints_recorded(*, draws_random_numbers: bool) -> Iterator[None]:
    """Let checkpointed parts be recorded; they raise UsageError if the step draws numbers."""

    def get_device_states(*_arguments: Any) -> tuple[list[int], list[Tensor]]:
        if draws_random_numbers:
            raise UsageError(
                "activation checkpointing with random numbers, such as those of dropout; "
                "next: dropout 0, or step eager"
            )
        return [], []

    patches = Patches()
    patches.put(checkpoint, "get_device_states", lambda _original: get_device_states)
    try:
        yield
    finally:
        patches.undo()


class RandomDraws:
    """Notices calls that draw from the default random generator of a GPU; the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.found = False

    @contextmanager
    def observe(self) -> Iterator[None]:
        if self.found:
            yield
            return
        before = torch.cuda.get_rng_state(self._device)
        yield
        self.found = not torch.equal(before, torch.cuda.get_rng_state(self._device))
