"""Weights as bytes, and some as numbers: whether ranks that should have the same ones do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from nfold.frameworks.checksum import checksum

SAMPLED_VALUES = 64
"""Numbers that tell by how much parameters differ."""


def parameter_checksum(parameters: Iterable[Tensor]) -> str:
    """Equal on all ranks whose parameters are equal, bit by bit."""
    return checksum(_parameter_contents(parameters))


def _parameter_contents(parameters: Iterable[Tensor]) -> Iterator[bytes]:
    """The bytes of every parameter, in their order."""
    for parameter in parameters:
        values = parameter.detach().cpu().contiguous().flatten()
        yield values.view(torch.uint8).numpy().tobytes()


def sample_parameters(parameters: Sequence[Tensor]) -> tuple[float, ...]:
    """SOME of their numbers, from as many parameters as there are, in the same places on all ranks.

    None where no parameter has any.
    """
    several = [one for one in parameters if one.numel() and one.is_floating_point()]
    several = several[:: -(-len(several) // SAMPLED_VALUES) or 1]
    each = -(-SAMPLED_VALUES // len(several)) if several else 0
    return tuple(number for one in several for number in _sample_values(one, each))


def _sample_values(parameter: Tensor, count: int) -> list[float]:
    """About as many numbers of it; what is in another order in memory is copied, by itself."""
    step = -(-parameter.numel() // count)
    found: list[float] = parameter.detach().flatten()[::step].double().cpu().tolist()
    return found
