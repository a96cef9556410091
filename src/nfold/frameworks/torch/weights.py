"""Weights as bytes, and some as numbers: whether ranks that should have the same ones do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from nfold.frameworks.checksum import checksum

SOME = 64
"""Numbers that tell by how much parameters differ."""


def checksum_of(parameters: Iterable[Tensor]) -> str:
    """Equal on all ranks whose parameters are equal, bit by bit."""
    return checksum(_contents(parameters))


def _contents(parameters: Iterable[Tensor]) -> Iterator[bytes]:
    """The bytes of every parameter, in their order."""
    for parameter in parameters:
        values = parameter.detach().cpu().contiguous().flatten()
        yield values.view(torch.uint8).numpy().tobytes()


def some_of(parameters: Sequence[Tensor]) -> tuple[float, ...]:
    """SOME of their numbers, from as many parameters as there are, in the same places on all ranks.

    None where no parameter has any.
    """
    several = [
        one.detach().flatten() for one in parameters if one.numel() and one.is_floating_point()
    ]
    several = several[:: -(-len(several) // SOME) or 1]
    each = -(-SOME // len(several)) if several else 0
    found = [one[:: -(-one.numel() // each)].double().cpu() for one in several]
    return tuple(number for one in found for number in one.tolist())
