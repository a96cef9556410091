"""What is told of batches that DataLoaders gave, and to whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass
class Taken:
    """What fed one step: samples of this rank, their hash, batches, and seconds of waiting."""

    samples: int = 0
    sample_hash: int = 0
    batches: int = 0
    wait_s: float = 0.0


def together(fed: Iterable[Taken], beside: Iterable[Taken]) -> Taken:
    """What fed one step: its samples are those that were ``fed``, its waiting is that of all."""
    whole = Taken()
    for one in fed:
        whole.samples += one.samples
        whole.sample_hash += one.sample_hash
        whole.batches += one.batches
        whole.wait_s += one.wait_s
    whole.wait_s += sum(one.wait_s for one in beside)
    return whole


@dataclass(frozen=True)
class Fed:
    """A step's samples and their hash, as a recorder notes them."""

    count: int
    sample_hash: int


class Listener(Protocol):
    """Who is told what happens between steps."""

    def pass_begins(self, *, feeds: bool) -> None:
        """A pass over a loader begins; ``feeds``: one that is known to feed the training."""

    def pass_began(self) -> None:
        """Its workers have started, the first batch is there."""

    def pass_ended(self) -> None:
        """It has no more batches."""

    def asked(self) -> None:
        """A batch that feeds the training is asked for."""

    def aside(self) -> None:
        """A batch was given that feeds no training, or not yet."""
