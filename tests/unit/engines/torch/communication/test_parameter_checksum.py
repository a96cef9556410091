"""Checksums and samples of parameters."""

import pytest
import torch
from torch import nn

from nfold.engines.torch.communication.data_parallel import (
    SAMPLED_VALUES,
    parameter_checksum,
    sample_parameters,
)


def test_a_checksum_sees_every_value_and_no_layout() -> None:
    """A 1 × 1 weight in channels_last has ambiguous strides: its bytes once could not be read."""
    torch.manual_seed(0)
    pointwise = nn.Conv2d(16, 32, 1)
    module = nn.Sequential(pointwise, nn.Conv2d(32, 8, 3))
    first = parameter_checksum(module.parameters())
    for weight in module.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    assert parameter_checksum(module.parameters()) == first
    with torch.no_grad():
        pointwise.weight[3, 5, 0, 0] += 1e-3
    assert parameter_checksum(module.parameters()) != first


@pytest.mark.parametrize("layers", [1, 5, 3 * SAMPLED_VALUES])
def test_some_numbers_are_of_as_many_parameters_as_there_are(layers: int) -> None:
    module = nn.Sequential(*(nn.Linear(20, 3) for _ in range(layers)))
    parameters = list(module.parameters())
    before = sample_parameters(parameters)
    assert SAMPLED_VALUES / 2 <= len(before) <= 2 * SAMPLED_VALUES
    assert before == sample_parameters(parameters)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1.0)
    assert all(new != old for new, old in zip(sample_parameters(parameters), before, strict=True))


def test_what_has_no_numbers_has_none() -> None:
    assert (
        sample_parameters([])
        == sample_parameters([torch.empty(0), torch.ones(3, dtype=torch.int64)])
        == ()
    )
