"""Convolutions of few channels as matrix products: equal results, only in compiled code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nfold.core.plan import Plan
from nfold.engines.torch.layout import Im2colMarker, im2col_conv2d, is_eligible, use_im2col

PLAN = Plan(device="cuda", precision="bf16", layout="channels_last", step="compiled+captured")
SIDES: list[dict[str, Any]] = [
    {"kernel_size": 3, "padding": 1, "bias": False},
    {"kernel_size": 3},
    {"kernel_size": (1, 5), "padding": (0, 3)},
    {"kernel_size": 1, "padding": 2},
]


def _images() -> torch.Tensor:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 9, 7, dtype=torch.float64)
    return images.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("sides", SIDES)
def test_it_is_the_convolution(sides: dict[str, Any]) -> None:
    layer = nn.Conv2d(3, 6, **sides).double()
    found, expected = im2col_conv2d(layer, _images()), layer(_images())
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected)
    for one, other in zip(_gradients(layer, found), _gradients(layer, expected), strict=True):
        torch.testing.assert_close(one, other)


def _gradients(layer: nn.Module, outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(outputs.square().sum(), list(layer.parameters()))


def test_compiled_code_takes_products_and_other_code_does_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3)).double()
    expected, kept = model(_images()), copy.deepcopy(model)
    use_im2col(model, PLAN)
    assert [isinstance(layer, Im2colMarker) for layer in model] == [True, False, False]
    assert torch.equal(model(_images()), expected)
    graphs = []

    def looked_at(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(str(graph.code))
        return graph.forward

    torch.testing.assert_close(torch.compile(model, backend=looked_at)(_images()), expected)
    (code,) = graphs
    assert "unfold" in code
    assert code.count("conv2d") == 1
    assert list(model.state_dict()) == list(kept.state_dict())
    assert type(copy.deepcopy(model)[0]) is nn.Conv2d


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 6, 3, stride=2),
        nn.Conv2d(3, 6, 3, dilation=2),
        nn.Conv2d(4, 8, 3, groups=2),
        nn.Conv2d(3, 6, 3, padding="same"),
        nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(3, 6, 5),
        nn.Conv2d(8, 8, 1),
        type("Own", (nn.Conv2d,), {})(3, 6, 3),
        nn.Linear(3, 6),
    ],
)
def test_others_stay_what_they_are(layer: nn.Module) -> None:
    assert not is_eligible(layer)


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cpu"},
        {"step": "captured"},
        {"precision": "fp32"},
        {"precision": "tf32"},
        {"layout": "channels_first"},
    ],
)
def test_other_plans_leave_them(change: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3))
    use_im2col(model, PLAN.edit(**change))
    assert type(model[0]) is nn.Conv2d
