"""A bucket gathers gradients of any memory layout and assigns views of itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nfold.engines.torch.communication.gradient_exchange import Bucket

SHAPES = [(8, 3, 3, 3), (8,), (4, 8, 1, 1), (10, 4), ()]


def parameters(layout: torch.memory_format) -> list[nn.Parameter]:
    made = [torch.zeros(shape) for shape in SHAPES]
    return [nn.Parameter(t.to(memory_format=layout) if t.dim() == 4 else t) for t in made]


def gradients(layout: torch.memory_format) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(shape) for shape in SHAPES]
    return [t.to(memory_format=layout) if t.dim() == 4 else t for t in made]


@pytest.mark.parametrize("mine", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("theirs", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("missing", [None, 0, 3])
def test_what_went_in_comes_back(
    mine: torch.memory_format, theirs: torch.memory_format, missing: int | None
) -> None:
    """As numbers and as the parameters lie; what is missing was used nowhere and stays None."""
    bucket = Bucket(parameters(mine), None)
    bucket.flat.fill_(torch.nan)
    expected = gradients(theirs)
    for place, (parameter, gradient) in enumerate(zip(bucket.parameters, expected, strict=True)):
        parameter.grad = None if place == missing else gradient
    bucket.gather(0.5, accumulate=False)
    assert not bucket.flat.isnan().any()
    bucket.assign_gradients(check_unused=True)
    for place, (parameter, gradient) in enumerate(zip(bucket.parameters, expected, strict=True)):
        if place == missing:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, 0.5 * gradient)
        assert parameter.grad.stride() == parameter.stride()


def test_a_gradient_that_is_there_already_stays() -> None:
    bucket = Bucket(parameters(torch.channels_last), None)
    for parameter, gradient in zip(bucket.parameters, gradients(torch.channels_last), strict=True):
        parameter.grad = gradient
    for _ in range(2):
        bucket.gather(None, accumulate=False)
        bucket.assign_gradients(check_unused=False)
    for parameter, gradient in zip(bucket.parameters, gradients(torch.channels_last), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_odd_sizes_come_last_so_that_views_are_aligned() -> None:
    sizes = [10, 64, 3, 16]
    bucket = Bucket([nn.Parameter(torch.zeros(size)) for size in sizes], None)
    assert [parameter.numel() for parameter in bucket.parameters] == [64, 16, 10, 3]
    assert [view.storage_offset() for view in bucket.views] == [0, 64, 80, 90]
