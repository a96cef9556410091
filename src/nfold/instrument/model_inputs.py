"""What a rank's model gets in its first steps, and the random numbers drawn between them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nfold.instrument.input.batch_tensors import content_hash

COMPARED_INPUTS = 4  # enough to tell augmented copies, too few to tell repetition
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class ModelInputLog:
    """Hashes of the first inputs of a model, and of the random number generators at these.

    ``limit``: of how many inputs, None for all of the warm-up.
    """

    def __init__(self, limit: int | None = COMPARED_INPUTS) -> None:
        self.hashes: list[str] = []
        self._generator_states: list[str] = []
        self._limit = limit

    def record(self, inputs: Any) -> None:
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        if not capturing and (self._limit is None or len(self.hashes) < self._limit):
            self.hashes.append(content_hash(inputs))
            self._generator_states.append(_generator_states())

    def generator_states(self, models: Iterable[nn.Module]) -> tuple[str, ...]:
        """Return them, or nothing for models with dropout: these draw numbers themselves."""
        random = any(map(_drops_out, models))
        return () if random else tuple(self._generator_states)


def _generator_states() -> str:
    """Return a hash of the states of PyTorch's generators: of the host and the current GPU."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    digest = hashlib.blake2b(digest_size=8)
    for state in states:
        digest.update(state.numpy().tobytes())
    return digest.hexdigest()


def _drops_out(model: nn.Module) -> bool:
    return any(isinstance(module, DROPOUTS) and module.p > 0 for module in model.modules())
