"""Weights as bytes: whether ranks that should have the same ones do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from nfold.frameworks.checksum import checksum


def checksum_of(parameters: Iterable[Tensor]) -> str:
    """Equal on all ranks whose parameters are equal, bit by bit."""
    return checksum(_contents(parameters))


def _contents(parameters: Iterable[Tensor]) -> Iterator[bytes]:
    """The bytes of every parameter, in their order."""
    for parameter in parameters:
        values = parameter.detach().cpu().contiguous().flatten()
        yield values.view(torch.uint8).numpy().tobytes()
