"""What is told of batches that DataLoaders gave, and to whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass
class StepInput:
    """What fed one step: samples of this rank, their hash, batches, and seconds of waiting."""

    samples: int = 0
    sample_hash: int = 0
    batches: int = 0
    wait_s: float = 0.0


def merge_inputs(
    epoch_inputs: Iterable[StepInput], companion_inputs: Iterable[StepInput]
) -> StepInput:
    """What fed one step: its samples are those that were ``fed``, its waiting is that of all."""
    whole = StepInput()
    for one in epoch_inputs:
        whole.samples += one.samples
        whole.sample_hash += one.sample_hash
        whole.batches += one.batches
        whole.wait_s += one.wait_s
    whole.wait_s += sum(one.wait_s for one in companion_inputs)
    return whole


@dataclass(frozen=True)
class StepCount:
    """A step's samples and their hash, as a recorder notes them."""

    count: int
    sample_hash: int


class EpochListener(Protocol):
    """Who is told what happens between steps."""

    def on_pass_start(self, *, feeds_training: bool) -> None:
        """A pass over a loader begins; ``feeds``: one that is known to feed the training."""

    def on_first_batch(self) -> None:
        """Its workers have started, the first batch is there."""

    def on_pass_end(self) -> None:
        """It has no more batches."""

    def on_batch_request(self) -> None:
        """A batch that feeds the training is asked for."""

    def on_other_batch(self) -> None:
        """A batch was given that feeds no training, or not yet."""
