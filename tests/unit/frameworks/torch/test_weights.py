"""Weights of ranks are compared as bytes."""

import torch
from torch import nn

from nfold.frameworks.torch.weights import checksum_of


def test_a_checksum_sees_every_value_and_no_layout() -> None:
    """A 1 × 1 weight in channels_last has ambiguous strides: its bytes once could not be read."""
    torch.manual_seed(0)
    pointwise = nn.Conv2d(16, 32, 1)
    module = nn.Sequential(pointwise, nn.Conv2d(32, 8, 3))
    first = checksum_of(module.parameters())
    for weight in module.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    assert checksum_of(module.parameters()) == first
    with torch.no_grad():
        pointwise.weight[3, 5, 0, 0] += 1e-3
    assert checksum_of(module.parameters()) != first
