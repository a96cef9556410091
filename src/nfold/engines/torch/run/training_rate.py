"""Samples and tokens per second of the training loops of a script."""

from __future__ import annotations

import time
from collections import UserDict
from typing import Any

import torch
from torch import Tensor

from nfold.engines.sampling import BatchShare
from nfold.engines.torch.nested_tensors import collect_tensors

TOKENS = "input_ids"


class TrainingRate:
    """Counts the samples of all ranks, and times the loops between ``resume`` and ``pause``.

    A share tells the samples of all ranks, so ranks exchange nothing. The tokens of other ranks are
    those of this rank's sequences: with different lengths an estimate.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: float | None = None
        self._seconds = self._samples = self._tokens = 0.0

    def resume(self) -> None:
        if self._started is None:
            self._started = time.monotonic()

    def pause(self) -> None:
        """Stop the clock when the device has finished its work."""
        if self._started is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds += time.monotonic() - self._started
        self._started = None

    def count(self, batch: Any, share: BatchShare) -> None:
        """Count a micro-batch of all ranks."""
        self.resume()
        samples = share.global_count / share.micro_batches
        self._samples += samples
        self._tokens += samples * _sequence_length(batch)

    def take(self) -> dict[str, float]:
        """Return the rates since the last call; empty if no sample was counted."""
        running = self._started is not None
        self.pause()
        counted = {"samples_per_s": self._samples, "tokens_per_s": self._tokens}
        rates = {name: count / self._seconds for name, count in counted.items() if count}
        self._seconds = self._samples = self._tokens = 0.0
        if running:
            self.resume()
        return rates


def _sequence_length(batch: Any) -> int:
    """The length of token sequences [n, length], 0 if the batch has none."""
    if isinstance(batch, dict | UserDict) and isinstance(batch.get(TOKENS), Tensor):
        tensors = [batch[TOKENS]]
    else:
        tensors = collect_tensors(batch)[:1]
    is_tokens = bool(tensors) and tensors[0].dim() == 2
    return tensors[0].shape[1] if is_tokens and tensors[0].dtype in _TOKEN_TYPES else 0


_TOKEN_TYPES = (torch.int64, torch.int32)
